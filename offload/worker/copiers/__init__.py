"""Ways to copy blocks: between GPU and pinned memory, within host memory, and wrongly on purpose."""

from offload.messages import Route
from offload.worker.copiers.base import Copier, CopyEnd
from offload.worker.copiers.cpu import CpuCopier
from offload.worker.copiers.cuda import CudaCopier

__all__ = ["Copier", "CopyEnd", "CpuCopier", "CudaCopier", "Route"]
