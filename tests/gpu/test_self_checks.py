"""What ``kv-offload certify`` copies on a GPU: every way of copying, in every layout that vLLM has."""

import pytest
import torch
from vllm.platforms import current_platform

from offload.testing.self_checks import check_copies
from offload.vllm.copy_paths import COPY_ENGINE, KERNEL
from tests.offload.places import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("path", [COPY_ENGINE, KERNEL])
def test_copies_bring_the_right_bytes(path: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    said = check_copies(device, path, seed=0)
    assert f"copies by {path} on {current_platform.get_device_name()}" in said
    if path == COPY_ENGINE:
        assert "all bytes right" in said
