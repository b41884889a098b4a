"""What all requests share, and the choice of engines for each of them."""

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from offload.proxy.faults import EngineError
from offload.proxy.history import History
from offload.proxy.kv_streams import KvStreams
from offload.proxy.members import Leg, Member, Members
from offload.proxy.metrics import ProxyMetrics
from offload.proxy.policies import Fleet, LeastLoad, Policy, Request, Route
from offload.proxy.prefixes import Sources
from offload.proxy.settings import ProxySettings
from offload.proxy.tokens import Tokens
from offload.proxy.trees import EngineTrees
from offload.proxy.turns import Turn
from offload.proxy.upstream import Upstreams
from offload.transfer_params import KVTransferParams

__all__ = ["Core"]

logger = logging.getLogger(__name__)


class Core:
    """Engines, connections to them, the policy and the counters."""

    def __init__(self, settings: ProxySettings, members: Members, policy: Policy) -> None:
        self.settings = settings
        self.members = members
        self.upstreams = Upstreams(settings)
        self.metrics = ProxyMetrics()
        self.history = History(settings.history_tokens)
        self.tokens = Tokens(settings, members, self.upstreams, self.metrics, self.now)
        self.trees = EngineTrees(settings, self.upstreams, self.metrics)
        self.events = KvStreams(settings, self.metrics)
        self._follows = False
        self._policy = policy
        if callable(attach := getattr(policy, "attach", None)):
            attach(Sources(self.tokens.of, self.history.depths, (self.events, self.trees)))
            self._follows = True
        self._fallback = LeastLoad()
        self._warned: set[tuple[str, ...]] = set()

    async def open(self) -> None:
        """Connect to engines, and follow their events if the policy wants to know what they have."""
        await self.upstreams.open()
        if self._follows:
            self.events.open()

    async def close(self) -> None:
        """Let go of all of them."""
        await self.tokens.close()
        await self.events.close()
        await self.trees.close()
        await self.upstreams.close()

    @staticmethod
    def now() -> float:
        """On the clock of members."""
        return asyncio.get_running_loop().time()

    def warn_once(self, *about: str, text: str) -> None:
        """Log a warning, unless one about the same was logged."""
        if about not in self._warned and len(self._warned) < 10_000:
            self._warned.add(about)
            logger.warning("%s (this is said once)", text)

    def has(self, member: Member, request: Request, answer: Sequence[int] = ()) -> None:
        """An engine has a prompt now, and the answer, as far as token ids of both are known."""
        self.history.add(request, member.url)
        if request.token_ids is None and (ids := self.tokens.known(request)) is not None:
            self.history.add(request._replace(token_ids=[*ids, *answer]), member.url)
        elif answer and request.token_ids is not None:
            self.history.add(request._replace(token_ids=[*request.token_ids, *answer]), member.url)

    # Which engines

    async def route(self, turn: Turn, but: set[str], is_alone: bool) -> Route | None:
        """Where a request goes. None: each engine that decodes has failed it.

        Args:
            but: engines that have failed it.
            is_alone: no prefill leg, since it has had one.
        """
        fleet = self.members.fleet(but, is_alone or turn.alone is not None)
        if fleet is None:
            return None
        route = await self._chosen(turn, fleet)
        if is_alone or route.prefill is None:
            if not is_alone:
                self.metrics.alone.labels(turn.alone or "no prefill engine").inc()
            return Route(None, route.decode)
        if why := self._why_alone(turn, route):
            self.metrics.alone.labels(why).inc()
            return Route(None, route.decode)
        return route

    async def _chosen(self, turn: Turn, fleet: Fleet) -> Route:
        why = "error"
        try:
            route = self._policy.choose(turn.request, fleet)
            if inspect.isawaitable(route):
                async with asyncio.timeout(
                    2 * (self.settings.tokenize_seconds + self.settings.locate_seconds)
                ):
                    route = await route
            if isinstance(route, Route) and _is_of(route, fleet):
                return route
            why = "not in the fleet"
            self.warn_once("policy", text=f"the policy chose {str(route)[:200]}, which is not in the fleet")
        except TimeoutError:
            why = "late"
        except Exception as error:
            if "policy error" not in {each[0] for each in self._warned}:
                logger.exception("the policy failed")
            self.warn_once("policy error", text=f"the policy failed: {error!r}")
        self.metrics.fallbacks.labels(why).inc()
        return self._fallback.choose(turn.request, fleet)

    def _why_alone(self, turn: Turn, route: Route) -> str | None:
        assert route.prefill is not None
        if route.prefill.url == route.decode.url:
            return "same engine"
        if route.decode.role == "both" and route.prefill.role == "both":
            return "no prefill engine"
        known = self.history.depths(turn.request).get(route.decode.url, 0)
        return "cached" if turn.request.num_tokens - known < self.settings.min_prefill_tokens else None

    # The prefill leg

    def expected(self, member: Member) -> dict[str, Any] | None:
        """A reference to what an engine is about to have. None: it has not yet told its name."""
        if member.peer is None or self.settings.is_sequential:
            return None
        return KVTransferParams(peer=member.peer, epoch=member.epoch).to_dict()

    async def prefill(self, member: Member, turn: Turn, headers: Mapping[str, str]) -> dict[str, Any] | None:
        """Have an engine prefill. Returns what it says of the KV; None: there is none. Never raises."""
        outcome, reference, begun = "cancelled", None, self.now()
        tokens = turn.request.num_tokens
        member.prompt_tokens += tokens
        member.begin()
        try:
            told = await self.upstreams.whole(
                f"{member.url}{turn.request.path}",
                headers,
                turn.prefill_body(),
                Leg(lambda: False),
                self.settings.prefill_seconds,
                False,
            )
            if told.status != 200:
                outcome = "refused"
                member.heard()
            else:
                reference = self._read_reference(member, turn, told.body)
                outcome = "done" if reference is not None else "no reference"
                member.succeeded()
                self.has(member, turn.request)
        except EngineError as error:
            outcome = "failed"
            self.failed(member, error)
        except Exception:  # the decode leg goes on all the same
            outcome = "failed"
            logger.exception("a prefill leg failed")
        finally:
            member.prompt_tokens -= tokens
            member.forgotten()
            self.metrics.legs.labels("prefill", outcome).inc()
            self.metrics.waited.labels(outcome).observe(self.now() - begun)
        return reference

    def _read_reference(self, member: Member, turn: Turn, body: bytes) -> dict[str, Any] | None:
        try:
            answer = msgspec.json.decode(body)
        except (ValueError, RecursionError):
            raise EngineError("its answer is not JSON") from None
        if not isinstance(answer, dict):
            raise EngineError("its answer is not a JSON object")
        told = answer.get("kv_transfer_params")
        if not isinstance(told, dict) or not told:
            self.metrics.strangers.labels("prefill engine says nothing").inc()
            self.warn_once(
                "silent",
                member.url,
                text=f"prefill engine {member.url} returns no kv_transfer_params; it has no connector "
                f"that hands KV over, or no role and no listen: decode engines compute its prompts again",
            )
            return None
        read = KVTransferParams.read(told)
        if read.peer is not None:
            member.peer, member.epoch = read.peer, read.epoch
            if turn.num_prompts > 1:  # it is about the first of them
                return KVTransferParams(peer=read.peer, epoch=read.epoch).to_dict()
        if read.refused is not None:
            reason = self.metrics.refused_for(read.refused)
            self.warn_once(
                "refused",
                member.url,
                reason,
                text=f"prefill engine {member.url} does not hand off a prompt, for this reason: {reason}; "
                f"decode engines compute such prompts again",
            )
            return None
        return told

    def failed(self, member: Member, error: EngineError) -> None:
        """An engine has failed a request."""
        if not error.counts:
            member.forgotten()
            return
        settings = self.settings
        if member.failed(self.now(), error.is_dead, settings.eject_failures, settings.eject_seconds):
            self.metrics.ejections.labels(member.url).inc()
            if error.is_dead:
                self.history.forget(member.url)  # it comes back with nothing, if it does
                self.events.forget(member.url)
            logger.warning("engine %s is left alone for a while: %s", member.url, error)


def _is_of(route: Route, fleet: Fleet) -> bool:
    if route.decode not in fleet.decode:
        return False
    return route.prefill is None or route.prefill in fleet.prefill
