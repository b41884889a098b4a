"""What the packages promise about each other, read from their source: nothing is imported here."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("evictor", "allocator", "offload")
"""In the order of the arrows: each may import from those before it."""

STATEFUL = {
    "allocator.departures.Departures",
    "offload.scheduler.why.notes.Notes",
    "offload.scheduler.why.prompts.Prompts",
    "allocator.bags.Bags",
    "allocator.block_allocator.CpuOffloadingBlockAllocator",
    "allocator.checkpoints.Checkpoints",
    "allocator.in_flight.PlansInFlight",
    "allocator.events.EventLog",
    "allocator.hollow.Hollow",
    "allocator.covered.Covered",
    "allocator.index.PositionIndex",
    "allocator.leases.Leases",
    "allocator.node_table.NodeTable",
    "allocator.pins.Pins",
    "allocator.prefix_tree.PrefixTree",
    "allocator.resizing.Resizing",
    "allocator.slot_pool.SlotPool",
    "allocator.store_plans.StorePlans",
    "allocator.uncached.UncachedBlocks",
    "evictor.arc.ArcPolicy",
    "evictor.ghosts.Ghosts",
    "evictor.endings.Endings",
    "evictor.moments.Moments",
    "evictor.order.Order",
    "evictor.hazard.HazardPolicy",
    "evictor.gittins.GoingRate",
    "evictor.history.History",
    "evictor.hinted.HintedPolicy",
    "evictor.ranked.RankedPolicy",
    "evictor.reuse.ReuseStatistics",
    "evictor.s3fifo.S3FifoPolicy",
    "evictor.two_queues.TwoQueues",
    "offload.observe.lately.Lately",
    "offload.observe.metrics.Metrics",
    "offload.observe.recorder.TraceRecorder",
    "offload.observe.trace_writer.TraceWriter",
    "offload.scheduler.adapters.Adapters",
    "offload.scheduler.adapters._Roots",
    "offload.scheduler.answers.AnswerReuse",
    "offload.scheduler.arrivals.Arrivals",
    "offload.scheduler.aside.Aside",
    "offload.scheduler.back_pressure.BackPressure",
    "offload.scheduler.backlog.Backlog",
    "offload.scheduler.breaker.CircuitBreaker",
    "offload.scheduler.miniatures.Miniatures",
    "offload.scheduler.resizing.PoolResizing",
    "offload.scheduler.pool_target.PoolTarget",
    "offload.worker.awaited.Awaited",
    "offload.worker.cache_pages.CachePages",
    "offload.worker.resizing.WorkerResizing",
    "offload.scheduler.other_sizes.OtherSizes",
    "offload.scheduler.carryover.Carryover",
    "offload.scheduler.checkpoints.Checkpoints",
    "offload.scheduler.choices.Choices",
    "offload.scheduler.hand_offs.HandOffs",
    "offload.scheduler.given.Given",
    "offload.scheduler.ended.Ended",
    "offload.scheduler.holds.Holds",
    "offload.scheduler.jobs.JobLedger",
    "offload.scheduler.later.Later",
    "offload.scheduler.leavings.Leavings",
    "offload.scheduler.leases.Leases",
    "offload.scheduler.lookout.Lookout",
    "offload.scheduler.patience.Patience",
    "offload.scheduler.queues.GpuQueue",
    "offload.scheduler.queues.LinkQueue",
    "offload.scheduler.restore_index.RestoreIndex",
    "offload.scheduler.restores.Restores",
    "offload.scheduler.side.SchedulerSide",
    "offload.scheduler.spelling.SlotTokens",
    "offload.scheduler.stores.Stores",
    "offload.scheduler.turns.Turns",
    "offload.scheduler.unused.Unused",
    "offload.scheduler.tiers.announced.Announced",
    "offload.scheduler.tiers.beliefs.Beliefs",
    "offload.scheduler.tiers.named_places.NamedPlaces",
    "offload.scheduler.weights.Weights",
    "offload.scheduler.tiers.budget.WriteBudget",
    "offload.scheduler.tiers.cold_end.ColdEnd",
    "offload.scheduler.tiers.directory.Directory",
    "offload.scheduler.tiers.fetches.Fetches",
    "offload.scheduler.costs.LinkCost",
    "offload.scheduler.costs.PrefillCost",
    "offload.scheduler.gauges.Gauges",
    "offload.scheduler.tiers.pace.Pace",
    "offload.scheduler.tiers.probes.Probes",
    "offload.scheduler.tiers.shared.SharedDirectory",
    "offload.scheduler.tiers.spills.Spills",
    "offload.scheduler.tiers.told.ToldExtents",
    "offload.scheduler.waiting.Waiting",
    "offload.proxy.asking.Doors",
    "offload.proxy.history.History",
    "offload.proxy.kv_index.EngineIndex",
    "offload.proxy.kv_streams.KvStreams",
    "offload.proxy.members.Member",
    "offload.proxy.members.Members",
    "offload.proxy.tokens.Tokens",
    "offload.proxy.transcript.Transcript",
    "offload.proxy.trees.EngineTrees",
    "offload.testing.memory_engine.MemoryEngine",
    "offload.worker.media.named.NamedMedium",
    "offload.worker.media.outage.Outage",
    "offload.worker.media.store_keeper.StoreKeeper",
    "offload.worker.media.mooncake_keeper.MooncakeKeeper",
    "offload.worker.media.resp_medium.RespMedium",
    "offload.worker.allowance.Allowance",
    "offload.worker.elsewhere.Elsewhere",
    "offload.worker.following.Following",
    "offload.worker.media.runner.Runner",
    "offload.worker.media.seal_log.SealLog",
    "offload.worker.media.siblings.SiblingMedium",
    "offload.worker.media.slab.SlabMedium",
    "offload.worker.media.peers.PeerMedium",
    "offload.worker.media.peers.Whereabouts",
    "offload.worker.peers.addresses.Addresses",
    "offload.worker.peers.askers.Askers",
    "offload.worker.peers.cells.Cells",
    "offload.worker.peers.fleet.Fleet",
    "offload.worker.peers.landing.Landing",
    "offload.worker.peers.holdings.Holdings",
    "offload.worker.peers.locator.Locator",
    "offload.worker.peers.peer.Peer",
    "offload.worker.peers.shortcuts.Shortcuts",
    "offload.worker.peers.server.PeerServer",
    "offload.worker.peers.session.Session",
    "offload.worker.peers.shown.Shown",
    "offload.worker.pool.siblings.Siblings",
    "offload.worker.seals.Seals",
    "offload.worker.side.WorkerSide",
    "offload.worker.transfer.TransferEngine",
    "offload.scheduler.tiers.peer_fetches.PeerFetches",
    "offload.scheduler.tiers.peers.PeerDirectory",
    "offload.scheduler.tiers.peer_standings.PeerStandings",
    "offload.scheduler.askers.Askers",
}
CHECKED_BY_THEIR_OWNER = {
    "offload.worker.peers.askers.Asker",  # by Askers
    "evictor.ages.Ages",  # does not change
    "evictor.gittins.Lives",  # nor does it
    "offload.scheduler.miniatures.Sample",  # by Miniatures, which fill it
    "evictor.hazard._State",  # by HazardPolicy
    "offload.worker.resizing.PageThread",  # by WorkerResizing, which knows what it was given
    "offload.scheduler.fetched.Fetched",  # by Fetches, which all count there
    "evictor.caller.Caller",  # by its subclasses: it has no state but the policy
    "evictor.marks.Mark",  # by HintedPolicy
    "evictor.policy.Newcomer",  # by whoever stores: no state but what the policy keeps in it
    "evictor.ranked.Ranked",  # by RankedPolicy
    "evictor.history.Past",  # by HazardPolicy
    "evictor.history.Run",  # by History
    "allocator.bags.Checkpoint",  # by Bags and Checkpoints
    "allocator.node.Hashes",  # immutable
    "allocator.node.Node",  # by PrefixTree
    "allocator.ranking.Ranking",  # by CpuOffloadingBlockAllocator: it has no state but the tree and policy
    "allocator.node.Pin",  # by PrefixTree and Pins
    "allocator.planning.Planning",  # it has no state but the tree, the pool and the policy
    "allocator.adopting.Adopting",  # the same
    "allocator.shedding.Shedding",  # it has no state but the tree and the room
    "allocator.slot_pool.SlotQueue",  # by SlotPool: what is free is asked of it
    "allocator.room.Room",  # by CpuOffloadingBlockAllocator: its own state are two counts
    "offload.files.private.PrivateDirectory",  # the kernel's; its tests read modes and locks
    "offload.files.records.RecordLog",  # its state is the file; its tests read it back
    "offload.scheduler.answers._Account",  # by AnswerReuse
    "offload.scheduler.aside._Least",  # by Aside
    "offload.scheduler.resizing._UnderWay",  # by PoolResizing
    "offload.worker.pool.pressure.PressureWatch",  # its state is what the kernel said last
    "offload.scheduler.aside._Turn",  # by Aside
    "offload.scheduler.arrivals.Arrival",  # by Arrivals, and its plan by the allocator
    "offload.scheduler.backlog.Pending",  # by Backlog and Holds
    "offload.scheduler.groups.Groups",  # does not change
    "offload.scheduler.leavings.Left",  # by Later
    "offload.scheduler.why.absence.Absence",  # a time, beside what is remembered elsewhere
    "offload.scheduler.why.note.Note",  # by Notes
    "offload.scheduler.hits.Hits",  # it has no state but what all flows work with
    "offload.scheduler.flow.Job",  # by JobLedger, and its task by its flow
    "offload.scheduler.restore.Restore",  # by Restores
    "offload.scheduler.storable.Storable",  # it has no state
    "offload.scheduler.store.Store",  # by Stores
    "offload.scheduler.costs.Costs",  # by what it is made of
    "offload.scheduler.queues.Longest",  # by Choices
    "offload.scheduler.tiers.fetch.Batch",  # by Fetches
    "offload.scheduler.tiers.fetch.Fetch",  # by Fetches
    "offload.scheduler.tiers.peer_wish.PeerWish",  # by PeerFetches
    "offload.worker.media.lane.PeerLane",  # by TransferEngine: no state but what was told
    "offload.scheduler.tiers.probes.Question",  # by Probes
    "offload.scheduler.tiers.cold_end.Chain",  # by Spills
    "offload.scheduler.tiers.spills.Spill",  # by Spills
    "offload.proxy.admin.Admin",  # all it has are tasks under way
    "offload.proxy.asking._Connection",  # by its Door, and of one conversation at a time
    "offload.proxy.asking._Door",  # by Doors
    "offload.proxy.core.Core",  # by what it is made of
    "offload.proxy.events.Events",  # bytes that nobody has taken yet
    "offload.proxy.kv_index.Prompt",  # of one choice, and does not change but for what was made already
    "offload.proxy.kv_index._Place",  # by EngineIndex
    "offload.proxy.kv_streams._Stream",  # by KvStreams
    "offload.proxy.exchange.Exchange",  # the client's connection
    "offload.proxy.faults.AnswerError",  # does not change
    "offload.proxy.faults.ClientError",  # does not change
    "offload.proxy.faults.EngineError",  # does not change
    "offload.proxy.members.Leg",  # the loop's timer
    "offload.proxy.metrics.ProxyMetrics",  # counters of the library's
    "offload.proxy.policies.LeastLoad",  # a count
    "offload.proxy.policies.RoundRobin",  # a count
    "offload.proxy.prefixes.PrefixPolicy",  # a count
    "offload.proxy.relay.Relay",  # by Transcript, and of one request
    "offload.proxy.server.Proxy",  # by what it is made of
    "offload.proxy.stops.Stops",  # by Transcript's tests: text of a few characters
    "offload.proxy.strangers.Strangers",  # counts that engines have told
    "offload.proxy.upstream.Upstreams",  # connections of the library's
    "offload.testing.memory_engine.MemoryBlock",  # by MemoryEngine
    "offload.testing.memory_engine.MemoryRequest",  # plain data; whoever schedules changes it
    "offload.worker.pump.Pump",  # what it has is a thread; see test_pump
    "offload.worker.copiers.cpu.CpuCopier",  # all it has are queues; see the contract of copiers
    "offload.worker.copiers.cuda.CudaCopier",  # the same
    "offload.worker.lanes.CopyLane",  # by TransferEngine: no state but where the cache lies
    "offload.worker.lanes.Lane",  # the same
    "offload.worker.media.lane.MediumCopier",  # all it has are the jobs of its medium
    "offload.worker.media.lane.MediumLane",  # it has no state
    "offload.worker.media.lane.ProbeLane",  # the same
    "offload.worker.media.mooncake.MooncakeClient",  # the library's
    "offload.worker.media.mooncake_medium.MooncakeMedium",  # by NamedMedium; the rest is for one call
    "offload.worker.media.resp.Connection",  # the kernel's, and bytes that nobody has taken yet
    "offload.worker.media.runner._Mover",  # by Runner: whether it hangs is a matter of time
    "offload.worker.media.runner._Task",  # by Runner
    "offload.worker.media.slab_file.Bounce",  # it has no state but memory that is written before it is read
    "offload.worker.media.slab_file.SlabFile",  # the kernel's, too; see the contract of media
    "offload.scheduler.lasting.Lasting",  # all it has is a list of news
    "offload.worker.lasting.Lasting",  # the kernel's, and the table's; the tests of tables read both back
    "offload.worker.media.base.AbsentError",  # plain data
    "offload.worker.peers.client.Client",  # a connection's
    "offload.worker.peers.fleet._PeerThread",  # what it has is a thread
    "offload.worker.failures.FailureLog",  # a count, and a time
    "offload.worker.peers.link.SocketLink",  # the kernel's
    "offload.worker.peers.listener.Listener",  # what it has checks itself
    "offload.worker.peers.landing.NixlPool",  # does not change; what it reads into is Landing's
    "offload.worker.peers.nixl.Agent",  # the library's
    "offload.worker.peers.nixl.Exposed",  # the library's
    "offload.worker.peers.near.NearPool",  # it does not change; what it maps is another's
    "offload.worker.peers.peer.Count",  # counts
    "offload.worker.peers.peer._Idle",  # by Peer
    "offload.worker.peers.server._Connection",  # by PeerServer
    "offload.worker.peers.shown.Count",  # counts
    "offload.worker.pool.region.Region",  # the kernel's; its tests read files and locks
    "offload.worker.pool.region_index.RegionIndex",  # does not change
    "offload.worker.pool.table.SlotTable",  # its state is the memory; its tests read it back
    "offload.worker.media.store_inspection.StoredNamespace",  # counts
    "offload.worker.checker.Checker",  # it has no state but its threads
    "offload.worker.layout.BlockLayout",  # does not change
    "offload.worker.pool.segment.Segment",  # the kernel's, too
    "offload.worker.pool.memory.HostMemory",  # the kernel's; its tests read what is mapped and pinned
    "offload.worker.awaited._Restore",  # by WorkerSide
    "offload.worker.jobs.TransferJob",  # by TransferEngine
}


def modules(*top: str) -> dict[str, ast.Module]:
    """Source by module name, a package under its own name."""
    found = {}
    for path in sorted(path for name in top for path in (ROOT / name).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


OURS = modules(*PACKAGES)
ALL = OURS | modules("tests", "benchmarks")


def imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """What import statements among ``nodes`` name: modules, and names in them as ``module.name``."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_anywhere(module: str) -> set[str]:
    return set(imports(ast.walk(ALL[module])))


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and what below it runs when its module is imported; type checkers' imports do not."""
    yield node
    body = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        body = list(node.orelse)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        body = []
    for child in body:
        yield from run_at_import(child)


def module_of(name: str) -> str | None:
    """The module of ours that ``name`` is or is in."""
    while name and name not in OURS:
        name = name.rpartition(".")[0]
    return name or None


def test_there_is_something_to_look_at() -> None:
    assert {"evictor.lru", "allocator.prefix_tree", "offload"} <= OURS.keys()
    assert "allocator.plans.Hit" in imports_anywhere("allocator")
    assert {"evictor.LruPolicy", "typing.Any"} <= imports_anywhere("allocator.block_allocator")


ABOVE = {
    "evictor": ("allocator", "offload", "torch", "vllm"),
    "allocator": ("offload", "torch", "vllm"),
    "offload": ("vllm", "pytest", "hypothesis"),
    "offload.files": ("offload.scheduler", "offload.worker", "offload.vllm", "offload.testing", "torch"),
    "offload.messages": ("offload.scheduler", "offload.worker", "offload.vllm", "torch"),
    "offload.peering": (
        "offload.scheduler",
        "offload.worker",
        "offload.proxy",
        "offload.vllm",
        "offload.testing",
        "allocator",
        "evictor",
        "torch",
    ),
    "offload.scheduler": ("offload.worker", "offload.vllm", "offload.testing", "offload.sizing", "torch"),
    "offload.worker": (
        "offload.scheduler",
        "offload.vllm",
        "offload.testing",
        "offload.sizing",
        "offload.observe",
        "allocator",
        "evictor",
    ),
    "offload.observe": ("offload.scheduler", "offload.worker", "offload.vllm", "offload.testing", "torch"),
    "offload.sizing": ("offload.scheduler", "offload.worker", "offload.vllm", "offload.testing", "torch"),
    "offload.proxy": (
        "offload.scheduler",
        "offload.worker",
        "offload.observe",
        "offload.sizing",
        "offload.vllm",
        "offload.testing",
        "allocator",
        "evictor",
        "torch",
    ),
    "offload.vllm": ("offload.testing",),
}
"""What no module of a part imports. The two processes share ``offload.messages`` and what is below it."""

ALLOWED = {
    ("offload.vllm", "vllm"),
    ("offload.testing", "vllm"),
    ("offload.vllm.certification.run", "offload.testing"),  # the command runs the testing kit
}
"""Parts and what they may import all the same."""


def is_in(name: str, part: str) -> bool:
    return f"{name}.".startswith(f"{part}.")


def may_import(module: str, other: str) -> bool:
    if any(is_in(module, part) and other == theirs for part, theirs in ALLOWED):
        return True
    return not any(is_in(module, part) and other in others for part, others in ABOVE.items())


def against_the_rules(module: str, tree: ast.AST) -> set[str]:
    """What a module imports, anywhere in it, and must not."""
    known = {other for others in ABOVE.values() for other in others} | {"tests", "benchmarks"}
    met = {other for other in known for name in imports(ast.walk(tree)) if is_in(name, other)}
    return {other for other in met if other in ("tests", "benchmarks") or not may_import(module, other)}


@pytest.mark.parametrize("module", OURS)
def test_imports_follow_the_arrows(module: str) -> None:
    """evictor <- allocator <- offload; scheduler and worker apart; nothing imports tests or benchmarks."""
    assert not against_the_rules(module, ALL[module])


@pytest.mark.parametrize(
    ("module", "other"), [(part, other) for part, others in ABOVE.items() for other in others]
)
@pytest.mark.parametrize(
    "line",
    ["import {0}", "import {0}.deep", "from {0} import name", "def f():\n    from {0}.deep import name"],
)
def test_a_rule_that_is_broken_is_found(module: str, other: str, line: str) -> None:
    part = "offload.other" if module == "offload" else f"{module}.other"
    assert against_the_rules(part, ast.parse(line.format(other))) >= {other}


def test_only_a_function_of_the_command_certify_imports_the_testing_kit() -> None:
    tree = ALL["offload.vllm.certification.run"]
    assert not any(is_in(name, "offload.testing") for name in imports(run_at_import(tree)))


def test_what_is_required_is_imported_and_what_is_imported_is_required() -> None:
    """But torch comes with vLLM, matplotlib and what the proxy needs with extras; the border has more."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"\W", each.replace("-", "_"))[0] for each in project["dependencies"]}
    proxy = {re.split(r"\W", each.replace("-", "_"))[0] for each in project["optional-dependencies"]["proxy"]}
    proxy = {"zmq" if each == "pyzmq" else each for each in proxy}
    modules = [module for module in OURS if not may_import(module, "vllm")]
    others = {*sys.stdlib_module_names, *PACKAGES, "torch", "matplotlib"}
    assert tops([each for each in modules if not is_in(each, "offload.proxy")]) - others == required
    assert tops([each for each in modules if is_in(each, "offload.proxy")]) - others - required == proxy


def tops(modules: list[str]) -> set[str]:
    """What modules import, by first names."""
    return {name.partition(".")[0] for module in modules for name in imports_anywhere(module)}


def files_of_the_design() -> list[str]:
    """Files that docs/design.md lists: in the first cells of its tables, each below the name of a folder."""
    text = (ROOT / "docs" / "design.md").read_text().partition("\n## Files\n")[2]
    folder, files = "", []
    for line in text.splitlines():
        if heading := re.match(r"`([\w/]+/)`", line):
            folder = heading[1]
        elif line.startswith("|"):
            files += [folder + name for name in re.findall(r"`(\w+\.py)`", line.split("|")[1])]
    return files


def test_the_design_lists_every_file_once() -> None:
    """A new file of the three packages gets its place in "Files" of docs/design.md."""
    files = [path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    wanted = [file for file in files if not file.endswith("/__init__.py")]
    assert sorted(files_of_the_design()) == sorted(wanted)


def test_no_file_is_long() -> None:
    """One subject per file: what grows beyond 400 lines has a part that is a thing of its own."""
    sizes = {path: path.read_text().count("\n") for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert not {path.name: size for path, size in sizes.items() if size > 400}


def test_no_circular_imports() -> None:
    graph = {
        module: {target for name in imports(run_at_import(tree)) if (target := module_of(name)) is not None}
        for module, tree in OURS.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


@cache
def bound_names(module: str) -> frozenset[str]:
    """Names that a module has after import, leaving out those it imports from ours and that are not there."""
    names: set[str] = set()
    for node in ALL[module].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
            }
        elif isinstance(node, ast.ImportFrom) and node.module in OURS:
            there = bound_names(node.module) | {
                name.removeprefix(f"{node.module}.") for name in OURS if name.startswith(f"{node.module}.")
            }
            names |= {alias.asname or alias.name for alias in node.names if alias.name in there}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return frozenset(names)


def exported(module: str) -> list[str] | None:
    """The value of ``__all__``, None without one."""
    for node in ALL[module].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            value = ast.literal_eval(node.value)
            assert isinstance(value, list)
            return value
    return None


def export_order(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions: the order that ruff keeps too."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("module", [module for module in OURS if exported(module) is not None])
def test_exports_are_there_and_sorted(module: str) -> None:
    names = exported(module)
    assert names is not None
    assert names == sorted(set(names), key=export_order)
    assert set(names) <= bound_names(module)


@pytest.mark.parametrize(
    "package", [module for module in OURS if any(name.startswith(f"{module}.") for name in OURS)]
)
def test_packages_export_explicitly_all_that_they_import(package: str) -> None:
    """A package without ``__all__`` has nothing but its docstring."""
    names = exported(package)
    if names is None:
        assert ast.get_docstring(ALL[package])
        assert len(ALL[package].body) == 1
    else:
        assert {name for name in bound_names(package) if name[0] != "_"} == set(names)


def classes(*top: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for module, tree in modules(*top).items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                yield f"{module}.{node.name}", node


def has_state(node: ast.ClassDef) -> bool:
    """Whether ``__init__`` sets attributes, written out or by a dataclass that is not frozen."""
    decorators = [ast.unparse(each) for each in node.decorator_list]
    inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    return any("dataclass" in each and "frozen=True" not in each for each in decorators) or any(
        isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        for init in inits
        for each in ast.walk(init)
    )


def checked_classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Those that are looked at: all of which the state outlives a call, but vLLM's border and the kit."""
    parts = ("files", "scheduler", "worker", "observe", "proxy")
    yield from classes("evictor", "allocator", *(f"offload/{part}" for part in parts))
    module = "offload.testing.memory_engine"
    for node in ALL[module].body:
        if isinstance(node, ast.ClassDef):
            yield f"{module}.{node.name}", node


CHECKED = dict(checked_classes())


def test_every_stateful_class_is_listed() -> None:
    stateful = {name for name, node in CHECKED.items() if has_state(node)}
    assert stateful == STATEFUL | CHECKED_BY_THEIR_OWNER


@pytest.mark.parametrize("name", sorted(STATEFUL))
def test_stateful_classes_check_their_invariants(name: str) -> None:
    node = CHECKED[name]
    checks = [
        each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "check_invariants"
    ]
    assert len(checks) == 1, f"{name} has no check_invariants of its own"
    assert any(isinstance(each, ast.Assert) for each in ast.walk(checks[0])), f"{name} asserts nothing"
