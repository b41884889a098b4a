"""What is refused as vLLM configures an engine, before any model is loaded."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import VllmConfig
from vllm.config.attention import HiSparseConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from offload import ConfigError, HostMemoryError, OffloadConfig, OffloadError, UnsupportedError
from offload.fleet_config import FleetConfig, Role
from offload.transfer_params import KVTransferParams
from offload.vllm import support
from offload.vllm.certification.certificate import VARIABLE
from offload.vllm.hand_offs import as_params, owes_delivery
from offload.vllm.plugin import CONNECTOR, register
from offload.vllm.support import DRAFTS, check_before_start, check_cache_groups, check_engine
from offload.worker.pool.host_limits import host_memory_bytes
from tests.offload.vllm.models import KINDS, LEAST_BLOCK_BYTES_PER_TOKEN, write_model

Configure = Callable[..., VllmConfig]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories by kind of model."""
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(root, kind) for kind in KINDS}


@pytest.fixture
def configure(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Makes an engine's configuration as vLLM does, without asking a GPU whether memory can be pinned."""
    register()
    monkeypatch.setattr(support, "check_pinning", lambda: None)
    # vLLM turns this off for an external launcher, and leaves it so for the whole process.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    def make(model: str = "llama", transfer: dict[str, Any] | None = None, **arguments: Any) -> VllmConfig:
        return EngineArgs(
            model=models[model],
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            kv_transfer_config=transfer,  # type: ignore[arg-type]
            **arguments,
        ).create_engine_config()

    return make


def ours(role: str = "kv_both", **settings: Any) -> dict[str, Any]:
    """``--kv-transfer-config`` with our connector."""
    return {
        "kv_connector": CONNECTOR,
        "kv_role": role,
        "kv_connector_extra_config": settings or {"cpu_gib": 0.01},
    }


def check_message(refused: pytest.ExceptionInfo[Exception], *parts: str) -> None:
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"cpu_gb": 8}, ["'cpu_gb'", "kv_connector_extra_config", "did you mean 'cpu_gib'"]),
        ({"cpu_gib": "8"}, ["cpu_gib is '8'", "as a number, such as 8"]),
        ({"cpu_gib": 0}, ["cpu_gib is 0", "a positive number, such as 8"]),
        ({"cpu_gib": 1e9}, ["cpu_gib is 1000000000.0", "GiB of memory", "lower cpu_gib to at most"]),
        ({"store_decode_blocks": True}, ['lacks "cpu_gib"', 'add, say, "cpu_gib": 8']),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_settings(configure: Configure, settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        configure(transfer=ours(**settings))
    check_message(refused, *parts)


@pytest.mark.parametrize(
    ("ranks", "copies", "arguments"),
    [
        (1, 1, {}),
        (2, 2, {"tensor_parallel_size": 2, "hf_overrides": {"num_key_value_heads": 2}}),
        (2, 1, {"tensor_parallel_size": 2}),
    ],
)
def test_a_pool_too_small_for_one_block(
    configure: Configure, ranks: int, copies: int, arguments: dict[str, Any]
) -> None:
    """Ranks with the one head between them put their memory together."""
    if ranks > 1 and not current_platform.is_cpu():
        pytest.skip("needs vLLM's CPU backend, where ranks need no devices")
    least = LEAST_BLOCK_BYTES_PER_TOKEN * 32
    configure(transfer=ours(cpu_gib=least * copies / 2**30), **arguments)
    with pytest.raises(ConfigError) as refused:
        configure(transfer=ours(cpu_gib=(least - 1) * copies / 2**30), **arguments)
    check_message(
        refused,
        f"{(least - 1) * copies // ranks:,} bytes",
        f"{ranks} ranks",
        "one block of 32 tokens",
        f"{least:,}",
        "raise cpu_gib",
    )


REFUSED_ENGINES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama", {"enable_prefix_caching": False}, ["prefix caching is off", "--no-enable-prefix-caching"]),
    ("llama", {"transfer": ours("kv_producer")}, ['kv_role is "kv_producer"', '"kv_role": "kv_both"']),
    ("llama", {"transfer": ours("kv_consumer")}, ['kv_role is "kv_consumer"', '"kv_role": "kv_both"']),
    (
        "llama",
        {"speculative_config": {"method": "extract_hidden_states", "num_speculative_tokens": 1}},
        ['"extract_hidden_states"', "ngram, ", "eagle, ", "or remove --speculative-config"],
    ),
    (
        "llama",
        {"distributed_executor_backend": "external_launcher"},
        ["distributed_executor_backend is external_launcher", "use mp or ray"],
    ),
    (
        "llama",
        {"kv_offloading_size": 0.0},
        ["kv_offloading_size is 0.0", f"in place of {CONNECTOR}", "remove --kv-offloading-size"],
    ),
    (
        "llama",
        {"kv_offloading_size": 4.0, "kv_offloading_backend": "lmcache"},
        ["kv_offloading_size is 4.0", f"in place of {CONNECTOR}", "remove --kv-offloading-size"],
    ),
    ("hybrid", {"enable_prefix_caching": False}, ["prefix caching is off", "--no-enable-prefix-caching"]),
]


@pytest.mark.parametrize(("model", "arguments", "parts"), REFUSED_ENGINES, ids=lambda value: str(value)[:30])
def test_engines_that_cannot_be_served(
    configure: Configure, model: str, arguments: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(UnsupportedError) as refused:
        configure(model, **{"transfer": ours(), **arguments})
    check_message(refused, *parts)


def test_a_platform_whose_memory_no_copier_reaches(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: False, device_name="xpu")
    monkeypatch.setattr(support, "current_platform", platform)
    with pytest.raises(UnsupportedError, match=r'"xpu".*NVIDIA'):
        configure("llama", transfer=ours())


@pytest.mark.skipif(not current_platform.is_cpu(), reason="needs vLLM's CPU backend: ranks without devices")
def test_context_parallelism(configure: Configure) -> None:
    """A recorded trace needs blocks that divide 512 tokens, all ranks of a block together."""
    arguments = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "max_model_len": 512}
    config = configure(transfer=ours(cpu_gib=0.01, record_trace="/tmp/trace.jsonl"), **arguments)
    config.cache_config.block_size = 256
    assert check_engine(config) is not None
    config.cache_config.block_size = 512
    with pytest.raises(ConfigError, match="the block size is 1024, which does not divide"):
        check_engine(config)


def test_prefill_context_parallelism(configure: Configure) -> None:
    """No runner of the CPU backend takes it, so the setting is made behind vLLM's own checks."""
    config = configure(transfer=ours())
    config.parallel_config.prefill_context_parallel_size = 2
    assert check_engine(config) is not None


def test_a_cache_that_is_kept_in_host_memory_itself(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(transfer=ours())
    monkeypatch.setattr(config.attention_config, "hisparse_config", HiSparseConfig())
    with pytest.raises(UnsupportedError) as refused:
        check_engine(config)
    check_message(refused, "hisparse_config is HiSparseConfig(", "remove hisparse_config from")


def test_hashes_that_cover_tokens_after_their_block(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(transfer=ours())
    monkeypatch.setattr(VllmConfig, "num_hash_lookahead_tokens", 1, raising=False)
    with pytest.raises(UnsupportedError) as refused:
        check_engine(config)
    check_message(
        refused,
        "num_hash_lookahead_tokens is 1",
        '"disable_lookahead_block_hashes": true',
        "--speculative-config",
    )


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
def test_speculative_decoding_is_served(configure: Configure, models: dict[str, str], method: str) -> None:
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    drafts |= {"prompt_lookup_max": 3} if method == "ngram" else {"model": models["llama"]}
    config = configure(transfer=ours(), speculative_config=drafts)
    assert check_engine(config) == OffloadConfig(cpu_gib=0.01)


@pytest.mark.parametrize("method", ["dflash", "dspark", "custom_class", "a later one"])
def test_ways_to_draft_that_are_not_known(
    configure: Configure, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some need models or packages that are not here, so the setting is made behind vLLM's own checks."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    config = configure(transfer=ours(), speculative_config=drafts)
    for known in DRAFTS:
        monkeypatch.setattr(config.speculative_config, "method", known)
        check_engine(config)
    monkeypatch.setattr(config.speculative_config, "method", method)
    with pytest.raises(UnsupportedError) as refused:
        check_engine(config)
    check_message(refused, f'"{method}"', ", ".join(DRAFTS), "remove --speculative-config")


def test_auxiliary_outputs_that_a_restored_block_may_lack(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(transfer=ours())
    monkeypatch.setattr(config.aux_output_config, "enable_return_routed_experts", True)
    with pytest.raises(UnsupportedError) as refused:
        check_engine(config)
    check_message(refused, "enable_return_routed_experts is True", "remove --enable-return-routed-experts")


@pytest.mark.parametrize("kind", ["is_encoder_decoder", "is_diffusion"])
def test_models_whose_kv_depends_on_more_than_what_is_before(
    configure: Configure, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(transfer=ours())
    monkeypatch.setattr(type(config.model_config), kind, True)
    monkeypatch.setitem(vars(config.model_config), kind, True)  # some are kept once they are known
    with pytest.raises(UnsupportedError, match="llama is a model whose KV depends on more"):
        check_engine(config)


def test_ways_to_sleep_that_are_not_known(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(transfer=ours())
    monkeypatch.setattr(config.model_config, "sleep_mode_backend", "checkpoint")
    check_engine(config)
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)
    with pytest.raises(UnsupportedError) as refused:
        check_engine(config)
    check_message(refused, 'sleep_mode_backend is "checkpoint"', "set --sleep-mode-backend cumem")
    monkeypatch.setattr(config.model_config, "sleep_mode_backend", "cumem")
    check_engine(config)


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        ("0.30.4", "install 0.31.0, 0.32.0 or 0.33.0"),
        ("0.34.0", "run `kv-offload certify`"),
        ("0.32.11", "run `kv-offload certify`"),
    ],
)
def test_vllm_versions_that_were_not_tested(
    configure: Configure, version: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "certificate.json"))
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(UnsupportedError) as refused:
        configure(transfer=ours())
    check_message(refused, f"vLLM {version} is not", remedy)
    configure()


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.33.0+cpu"])
def test_vllm_versions_that_were(configure: Configure, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    configure(transfer=ours())


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("llama", {}),
        ("sliding window", {}),
        ("sliding window", {"disable_hybrid_kv_cache_manager": True}),
        ("alternating windows", {}),
        ("chunks", {}),
        ("hybrid", {}),
        ("alternating windows", {"disable_hybrid_kv_cache_manager": True}),
        ("chunks", {"disable_hybrid_kv_cache_manager": True}),
    ],
)
def test_engines_that_are_served(configure: Configure, model: str, arguments: dict[str, Any]) -> None:
    config = configure(model, transfer=ours(cpu_gib=0.5, store_decode_blocks=False), **arguments)
    assert check_engine(config) == OffloadConfig(cpu_gib=0.5, store_decode_blocks=False)


def test_the_default_pool_may_be_as_large_as_memory(configure: Configure) -> None:
    configure(transfer=ours(cpu_gib=host_memory_bytes() / 2**30))


@pytest.mark.skipif(not current_platform.is_cpu(), reason="needs vLLM's CPU backend: ranks without devices")
class TestDataParallelReplicas:
    """Each has a pool of its own."""

    def test_pools_that_fit_together(self, configure: Configure) -> None:
        configure(transfer=ours(cpu_gib=host_memory_bytes() / 2**30 / 2), data_parallel_size=2)

    @pytest.mark.parametrize(
        "size", [host_memory_bytes() / 2**30 * 0.6, 1e300, 10**400], ids=["0.6 of it", "1e300", "10**400"]
    )
    def test_pools_larger_than_memory_together(self, configure: Configure, size: float) -> None:
        with pytest.raises(ConfigError) as refused:
            configure(transfer=ours(cpu_gib=size), data_parallel_size=2)
        check_message(refused, f"cpu_gib is {size}", "of which 2 run", "GiB of memory", "lower cpu_gib")


OTHERS: list[dict[str, Any] | None] = [
    None,
    {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"cpu_gb": 1},
    },
]


class TestOtherConnectors:
    @pytest.fixture(autouse=True)
    def _our_checks_cannot_be_imported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("support", "versions", "connector"):
            monkeypatch.setitem(sys.modules, f"offload.vllm.{name}", None)

    @pytest.mark.parametrize("transfer", OTHERS, ids=["none", "another"])
    def test_nothing_of_theirs_is_refused_or_looked_at(
        self, configure: Configure, transfer: dict[str, Any] | None
    ) -> None:
        config = configure(transfer=transfer, enable_prefix_caching=False)
        assert (config.kv_transfer_config is None) == (transfer is None)

    def test_vllms_own_flag_is_left_to_it(self, configure: Configure) -> None:
        config = configure(kv_offloading_size=4.0)
        assert config.kv_transfer_config.kv_connector == "OffloadingConnector"

    def test_ours_is(self, configure: Configure) -> None:
        with pytest.raises(ImportError, match=r"offload\.vllm"):
            configure(transfer=ours())


LISTENS, FETCHES = {"listen": "127.0.0.1:7100"}, {"peers": ["127.0.0.1:7200"]}
OF_FLEETS: list[dict[str, Any]] = [
    {},
    LISTENS,
    {**LISTENS, "role": "prefill"},
    FETCHES,
    {**FETCHES, "role": "decode"},
    {**LISTENS, **FETCHES},
]
"""What ours may be in a fleet."""
TAKE_REFERENCES = ["NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector"]
TAKE_REFERENCES += ["MoRIIOConnector"]
"""vLLM's connectors that read ``do_remote_prefill``."""
TAKE_NONE = ["MooncakeStoreConnector", "LMCacheConnectorV1", "LMCacheMPConnector", "OffloadingConnector"]
TAKE_NONE += ["SimpleCPUOffloadConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "ExampleConnector"]
"""Others, which do not."""


class TestChildrenOfAMultiConnector:
    def multi(self, *children: Any) -> dict[str, Any]:
        settings = {"connectors": list(children)}
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
            "kv_load_failure_policy": "recompute",
        }

    def test_ours_is_checked_among_them(self, configure: Configure) -> None:
        other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        configure(transfer=self.multi(other, ours()))
        with pytest.raises(ConfigError, match="'cpu_gb'"):
            configure(transfer=self.multi(other, ours(cpu_gb=1)))
        with pytest.raises(UnsupportedError, match='kv_role is "kv_consumer"'):
            configure(transfer=self.multi(other, ours(role="kv_consumer")))

    def test_ours_is_not_replaced_among_them(self, configure: Configure) -> None:
        with pytest.raises(UnsupportedError, match=r"kv_offloading_size is 4\.0"):
            configure(transfer=self.multi(ours()), kv_offloading_size=4.0)

    def test_pipelines_are_served(self, configure: Configure) -> None:
        if not current_platform.is_cpu():
            pytest.skip("needs vLLM's CPU backend, where ranks need no devices")
        assert check_engine(configure(transfer=self.multi(ours()), pipeline_parallel_size=2)) is not None

    def test_failed_restores_must_not_fail_requests(self, configure: Configure) -> None:
        transfer = self.multi(ours()) | {"kv_load_failure_policy": "fail"}
        with pytest.raises(UnsupportedError, match='kv_load_failure_policy is "fail"'):
            configure(transfer=transfer)

    @pytest.mark.parametrize("name", [*TAKE_REFERENCES, *TAKE_NONE])
    def test_peers_alone_are_refused_beside_whoever_takes_references_for_its_own(
        self, configure: Configure, name: str
    ) -> None:
        """Requests with ``do_remote_prefill`` come to engines that fetch, and would end them."""
        config = configure(transfer=self.multi(ours(cpu_gib=0.01)))
        assert config.kv_transfer_config is not None
        other, settings = {"kv_connector": name, "kv_role": "kv_both"}, config.kv_transfer_config
        for said in OF_FLEETS:
            own = ours(cpu_gib=0.01)
            own["kv_connector_extra_config"].update(said)
            for children in ([other, own], [own, other]):
                settings.kv_connector_extra_config["connectors"] = children
                if name in TAKE_NONE or "peers" not in said:
                    assert check_engine(config) is not None
                    continue
                with pytest.raises(
                    UnsupportedError, match=rf"127.0.0.1:7200.*beside {name}.*remove peers, or {name}"
                ):
                    check_engine(config)

    def test_a_response_says_no_key_that_others_may_say_too(self, configure: Configure) -> None:
        told = KVTransferParams(do_remote_prefill=True, peer="0" * 16)
        inside, alone = configure(transfer=self.multi(ours())), configure(transfer=ours())
        assert as_params(told, alone) == told.to_dict()
        assert as_params(told, inside) == {
            key: value for key, value in told.to_dict().items() if key != "do_remote_prefill"
        }


class TestFleets:
    def test_hashes_are_the_same_everywhere(
        self, configure: Configure, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        transfer = ours(cpu_gib=0.01, listen="127.0.0.1:7100")
        config = configure(transfer=transfer)
        config.cache_config.prefix_caching_hash_algo = "xxhash_cbor"
        with pytest.raises(UnsupportedError, match="PYTHONHASHSEED"):
            check_engine(config)

    def test_each_rank_has_a_port(self, configure: Configure) -> None:
        config = configure(transfer=ours(cpu_gib=0.01, listen="127.0.0.1:65535"))
        assert check_engine(config) is not None
        config.parallel_config.data_parallel_index = 1
        with pytest.raises(ConfigError, match=r"listen is '127.0.0.1:65535'.*port 65536.*lower port"):
            check_engine(config)

    def test_a_key_that_is_not_there_is_refused(self, configure: Configure, tmp_path: Path) -> None:
        transfer = ours(cpu_gib=0.01, listen="0.0.0.0:7100", fleet_key_file=str(tmp_path / "key"))
        with pytest.raises(ConfigError, match="fleet_key_file is"):
            check_before_start(configure(transfer=transfer))

    def test_a_library_that_is_not_there_is_refused(
        self, configure: Configure, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "nixl", None)
        monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
        transfer = ours(cpu_gib=0.01, peers=["127.0.0.1:7100"], peer_transport="nixl")
        with pytest.raises(ConfigError, match=r"peer_transport is.*kv-offload\[rdma\]"):
            check_before_start(configure(transfer=transfer))

    def test_prefill_engines_owe_a_delivery_and_others_do_not(self) -> None:
        assert owes_delivery(FleetConfig(role=Role.PREFILL, listen="127.0.0.1:7100"))
        assert not owes_delivery(FleetConfig(role=Role.BOTH, listen="127.0.0.1:7100"))


class TestPinning:
    """Whether memory can be pinned is asked on CUDA only, and once all else is in order."""

    @pytest.fixture
    def refusing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> None:
            raise HostMemoryError("cannot pin")

        monkeypatch.setattr(support, "check_pinning", refuse)

    @pytest.mark.parametrize("cuda", [True, False])
    def test_a_refusal_is_one_before_the_start(
        self, configure: Configure, refusing: None, cuda: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            support, "current_platform", SimpleNamespace(is_cuda=lambda: cuda, is_cpu=lambda: not cuda)
        )
        if not cuda:
            configure(transfer=ours())
            return
        with pytest.raises(HostMemoryError, match="cannot pin"):
            configure(transfer=ours())
        with pytest.raises(ConfigError):
            configure(transfer=ours(cpu_gb=1))
        configure(transfer=None)

    def test_the_workers_do_not_ask_again(
        self, configure: Configure, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = configure(transfer=ours())
        monkeypatch.setattr(support, "current_platform", SimpleNamespace(is_cuda=lambda: True))
        monkeypatch.setattr(support, "check_pinning", lambda: pytest.fail("asked"))
        assert check_engine(config) is not None


def test_refusals_are_of_one_family() -> None:
    for error in (ConfigError, UnsupportedError, HostMemoryError):
        assert issubclass(error, OffloadError)
        assert issubclass(error, ValueError)


def test_checking_without_the_connector_checks_nothing(configure: Configure) -> None:
    config = configure(enable_prefix_caching=False)
    assert check_engine(config) is None
    check_before_start(config)


def attention(**more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, **more)


def window() -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=32
    )


def latent() -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)


def chunk() -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=32
    )


def state(mode: str = "align") -> MambaSpec:
    return MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode=mode)  # type: ignore[arg-type]


def groups_of(*specs: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(4, [], [KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)])


def uniform(**specs: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)


class TestCacheGroups:
    @pytest.mark.parametrize(
        "specs",
        [
            [attention()],
            [attention(sliding_window=32)],
            [latent()],
            [uniform(a=attention(), b=attention())],
            [window()],
            [uniform(a=window(), b=window())],
            [state()],
            [attention(), window(), window()],
            [chunk(), attention(), state()],
        ],
        ids=lambda specs: " ".join(type(spec).__name__ for spec in specs),
    )
    def test_kinds_that_are_served(self, specs: list[KVCacheSpec]) -> None:
        check_cache_groups(groups_of(*specs))

    def test_a_kind_that_is_not_known_is_refused(self) -> None:
        class Unknown(FullAttentionSpec):
            pass

        unknown = Unknown(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
        with pytest.raises(UnsupportedError) as refused:
            check_cache_groups(groups_of(attention(), unknown))
        check_message(refused, "KV cache group 1 is of kind Unknown", "Remove the connector")

    def test_states_that_are_not_kept_are_refused(self) -> None:
        with pytest.raises(UnsupportedError) as refused:
            check_cache_groups(groups_of(attention(), state("none")))
        check_message(refused, 'group 1 keeps its states in mode "none"', "set --mamba-cache-mode align")

    def test_layers_of_a_group_that_differ_are_refused(self) -> None:
        with pytest.raises(UnsupportedError) as refused:
            check_cache_groups(groups_of(uniform(a=window(), b=chunk())))
        check_message(refused, "layers of KV cache group 0 differ", "Remove the connector")

    def test_a_part_in_host_memory_is_refused(self) -> None:
        config = groups_of(attention())
        config.hisparse_host_num_blocks = 7
        with pytest.raises(UnsupportedError) as refused:
            check_cache_groups(config)
        check_message(refused, "7 KV blocks in host memory", "remove hisparse_config")

    def test_no_group_is_refused(self) -> None:
        with pytest.raises(UnsupportedError, match="no KV cache group has prefix hashes"):
            check_cache_groups(groups_of())
