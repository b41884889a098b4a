"""What the worker asks of the pool's memory, and when its stores go. Its copies are in tests/virtual."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from offload.messages import LOAD, STORE, Order, Part, StepPlan
from offload.testing.virtual import VirtualSettings
from offload.testing.virtual.parts import make_cache
from offload.testing.virtual.settings import make_kv_cache_config, make_vllm_config
from offload.vllm import connector
from offload.worker import side as worker_side
from offload.worker.copiers.cuda import register_host_memory, unregister_host_memory
from offload.worker.side import WorkerSide
from tests.virtual.driver import make_engine


class AskedError(Exception):
    """Raised instead of mapping memory."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    options: dict[str, Any] = {}

    def ask(num_slots: int, slot_bytes: int, **others: Any) -> None:
        options.update(others, nbytes=num_slots * slot_bytes)
        raise AskedError

    monkeypatch.setattr(worker_side, "HostMemory", ask)
    return options


def worker(**settings: Any) -> WorkerSide:
    """Made as vLLM makes it."""
    virtual = VirtualSettings()
    vllm_config = make_vllm_config(virtual)
    vllm_config.kv_transfer_config.kv_connector_extra_config |= settings
    made = KVConnectorFactory.create_connector(
        config=vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=make_kv_cache_config(virtual)
    )
    assert isinstance(made._worker, WorkerSide)
    return made._worker


def register(side: WorkerSide, device: torch.device) -> None:
    with pytest.raises(AskedError):
        side.register({"layer.0": SimpleNamespace(device=device)})  # type: ignore[dict-item]


@pytest.mark.parametrize("node", [1, None])
def test_the_pool_is_pinned_on_the_node_of_its_gpu(
    node: int | None, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_side, "pci_address", {torch.device("cuda", 2): "0000:3b:00.0"}.get)
    monkeypatch.setattr(worker_side, "node_of_pci_device", {"0000:3b:00.0": node}.get)
    register(worker(), torch.device("cuda", 2))
    assert asked["node"] == node
    assert asked["register"] is register_host_memory
    assert asked["unregister"] is unregister_host_memory


def test_the_pool_is_resized_as_a_thread_of_its_gpu_would(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(memory: object, make_executor: object, device: torch.device) -> None:
        assert device == torch.device("cuda", 2)
        raise AskedError

    monkeypatch.setattr(worker_side, "pci_address", lambda device: None)
    monkeypatch.setattr(worker_side, "HostMemory", lambda *_, **__: SimpleNamespace(facts=None))
    monkeypatch.setattr(worker_side, "WorkerResizing", ask)
    register(worker(), torch.device("cuda", 2))


def test_a_gpu_whose_place_is_not_told_has_no_node(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_side, "pci_address", lambda device: None)
    register(worker(), torch.device("cuda", 0))
    assert asked["node"] is None


def test_beside_a_cpu_engine_memory_is_neither_placed_nor_pinned(asked: dict[str, Any]) -> None:
    register(worker(), torch.device("cpu"))
    assert asked["node"] is asked["register"] is asked["unregister"] is None


@pytest.mark.parametrize(
    ("wanted", "of_pool", "of_cache"),
    [
        ({}, False, True),
        ({"huge_pages": "auto"}, False, True),
        ({"huge_pages": True}, True, True),
        ({"huge_pages": False}, False, False),
    ],
)
def test_huge_pages_are_asked_for_as_configured(
    wanted: dict[str, Any], of_pool: bool, of_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked, real = worker(**wanted), [], worker_side.HostMemory

    def ask(*sizes: int, **others: Any) -> Any:
        assert others["huge_pages"] is of_pool
        return real(*sizes, **others)

    monkeypatch.setattr(worker_side, "HostMemory", ask)
    closed: list[bool] = []

    def pages(kv_caches: dict[str, torch.Tensor]) -> Any:
        asked.append(kv_caches)
        return SimpleNamespace(close=lambda: closed.append(True))

    monkeypatch.setattr(worker_side, "CachePages", pages)
    vllm = SimpleNamespace(register_kv_caches=made.register)
    make_cache(VirtualSettings(), make_kv_cache_config(VirtualSettings()), vllm)
    assert bool(asked) is of_cache
    assert made._computes_here  # as on any CPU, where nothing else is said
    assert not closed
    made.close()
    assert closed == [True] * of_cache


@pytest.mark.parametrize(
    ("on_gpu", "is_second_runner", "samples_late"),
    [(True, True, False), (True, False, True), (False, False, False)],
)
def test_only_the_first_runner_on_a_gpu_samples_after_saving(
    on_gpu: bool, is_second_runner: bool, samples_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config = make_vllm_config(VirtualSettings())
    monkeypatch.setattr(connector, "current_platform", SimpleNamespace(is_cuda=lambda: on_gpu))
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", is_second_runner)
    made = connector.CpuOffloadConnector(
        vllm_config, KVConnectorRole.WORKER, make_kv_cache_config(VirtualSettings())
    )
    assert made._samples_late == samples_late


@pytest.mark.parametrize(
    ("platform", "sleeps"), [("cuda", True), ("cpu", True), ("rocm", False), ("xpu", False)]
)
def test_sleep_mode_is_claimed_where_its_memory_is_known(
    platform: str, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = SimpleNamespace(is_cuda=lambda: platform == "cuda", is_cpu=lambda: platform == "cpu")
    monkeypatch.setattr(connector, "current_platform", known)
    transfer = make_vllm_config(VirtualSettings()).kv_transfer_config
    assert connector.CpuOffloadConnector.supports_sleep_mode(transfer) is sleeps


@pytest.mark.parametrize(
    ("shares_cores", "begun"),
    [(False, [[], ["load"], ["load", "store"]]), (True, [["load"], ["load"], ["load"]])],
)
def test_loads_begin_beside_the_compute_of_their_step(shares_cores: bool, begun: list[list[str]]) -> None:
    """What computes on the thread that calls the worker comes between ``bind`` and ``begin_step``."""
    engine = make_engine(shares_cores=shares_cores)
    worker, seen = engine.ranks[0].side, []
    assert worker is not None and worker._engine is not None
    worker._engine._seals.seal(0, np.array([1]), np.array([0]))
    load = Order(LOAD, [Part(1, 0, 1)], np.array([0]), np.array([1]), np.array([0]), "a request")
    store = Order(STORE, [Part(2, 0, 1)], np.array([1]), np.array([1]))
    for go_on in (
        lambda: worker.bind(StepPlan(worker.facts.fingerprint, [load, store])),
        worker.begin_step,
        worker.end_step,
    ):
        go_on()
        seen.append([job.lane.route.verb for job in worker._engine._jobs.values()])
    assert seen == begun
    worker.bind(None)
    assert len(worker._engine) == 2


def test_a_cache_that_goes_away_is_stored_before() -> None:
    engine = make_engine(shares_cores=True)
    worker = engine.ranks[0].side
    assert worker is not None and worker._engine is not None
    store = Order(STORE, [Part(2, 0, 1)], np.array([1]), np.array([1]))
    worker.bind(StepPlan(worker.facts.fingerprint, [store]))
    worker.end_step()
    assert worker._behind
    worker.unregister()
    assert not worker._behind
    worker.poll()
    report = worker.take_report()
    assert report is not None
    assert report.jobs[2].num_good == 1
