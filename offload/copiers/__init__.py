"""Ways to copy blocks: between GPU and pinned memory, within host memory, and wrongly on purpose."""

from offload.copiers.base import Copier, CopyEnd, Direction
from offload.copiers.cpu import CpuCopier
from offload.copiers.cuda import CudaCopier
from offload.copiers.faulty import Fault, FaultyCopier

__all__ = ["Copier", "CopyEnd", "CpuCopier", "CudaCopier", "Direction", "Fault", "FaultyCopier"]
