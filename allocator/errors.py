"""Everything the allocator raises on purpose.

    AllocatorError (ValueError)
    ├── CapacityError          a pool size that cannot hold one block
    ├── ChainError             a chain, hash or block list of the wrong shape
    └── StalePlanError         a plan or pin that was ended already

Wrong arguments are the caller's bug and raise. Running out of slots is not an error: plans get shorter.
"""


class AllocatorError(ValueError):
    """Base of all errors of this package."""


class CapacityError(AllocatorError):
    """The pool cannot hold a single block."""


class ChainError(AllocatorError):
    """A chain of prefix hashes, or the block ids beside it, has the wrong shape."""


class StalePlanError(AllocatorError):
    """A store plan or a pin was ended twice, or belongs to another allocator."""
