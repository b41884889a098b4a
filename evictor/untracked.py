"""Objects that the garbage collector does not look at.

CPython's collector visits every object that may refer to others, and all that it refers to, in each
collection of the oldest generation. A pool of a million blocks has hundreds of thousands of such objects,
which live for hours. A visit to each stops the engine and finds nothing.

``untrack`` takes one out of the collector's lists. That is what CPython itself does with a tuple of numbers,
by the same function of its public interface. Reference counts work as before. What is lost: a cycle of such
objects is never found. So whoever makes them says when their life ends, and then cuts what refers back.

A dict may only be untracked if its keys and values refer to nothing, as bytes and numbers do. Up to Python
3.13 it is tracked again as soon as it gets others. A list stays as it is.
"""

import ctypes

untrack = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))
"""Take an object, of a type that is collected, out of the collector's sight for good. O(1)."""
