"""One request for an answer: its legs, and what happens when one of them fails."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from offload.proxy.core import Core
from offload.proxy.events import Events, data_of
from offload.proxy.exchange import Exchange
from offload.proxy.faults import AnswerError, EngineError
from offload.proxy.members import Leg, Member
from offload.proxy.settling import settle
from offload.proxy.transcript import Transcript
from offload.proxy.turns import Turn
from offload.proxy.upstream import Answer, raise_for, returned, timed

__all__ = ["Relay"]


class Relay:
    """Serves one request.

    Args:
        core: of the proxy.
        turn: the request.
        headers: for engines.
        exchange: with the client.
    """

    def __init__(self, core: Core, turn: Turn, headers: Mapping[str, str], exchange: Exchange) -> None:
        self._core = core
        self._turn = turn
        self._headers = {**headers, "Content-Type": "application/json"}
        self._exchange = exchange
        self._transcript = Transcript(turn)
        self._begun = core.now()
        self._failed: set[str] = set()
        self._retried: set[str] = set()
        self._last: AnswerError | None = None
        self._is_anyone_there = False
        self._num_attempts = 0
        self._prefill: asyncio.Task[dict[str, Any] | None] | None = None
        self._prefill_url = ""
        self._expected: dict[str, Any] | None = None

    async def serve(self) -> tuple[web.StreamResponse, str]:
        """The answer, and the outcome for the counters. Raises ClientGoneError."""
        try:
            return await self._serve()
        finally:
            if self._prefill is not None and not self._prefill.done():
                self._prefill.cancel()

    async def _serve(self) -> tuple[web.StreamResponse, str]:
        limit = self._core.settings.max_attempts
        while True:
            route = None
            if not limit or self._num_attempts < limit:
                route = await self._core.route(self._turn, self._failed, self._num_attempts > 0)
            if route is None:
                return await self._give_up()
            member = self._core.members.get(route.decode.url)
            if member is None:  # removed meanwhile
                self._failed.add(route.decode.url)
                continue
            if route.prefill is not None:
                await self._begin_prefill(route.prefill.url)
            self._num_attempts += 1
            try:
                return await self._attempt(member)
            except EngineError as error:
                self._note(member, error)
            if self._transcript.has_begun and not self._transcript.is_done:
                if self._transcript.is_finished and self._transcript.is_known:
                    await self._exchange.send(b"".join(self._transcript.tail()))
                    return await self._exchange.end(), "answered"
                if not self._transcript.can_go_on:
                    return await self._break_off()
            stage = "after" if self._transcript.has_begun else "before"
            self._core.metrics.failovers.labels(f"{stage} the first byte").inc()

    async def _begin_prefill(self, url: str) -> None:
        """The prefill leg begins; it ends here if the decode leg must know what comes of it."""
        member = self._core.members.get(url)
        if member is None:
            return
        self._expected = self._core.expected(member)
        self._prefill_url = url
        self._prefill = asyncio.create_task(self._core.prefill(member, self._turn, self._headers))
        if self._expected is None:
            await asyncio.wait([self._prefill])  # it ends within its own time limit

    def _reference(self, member: Member) -> Mapping[str, Any] | None:
        """What the decode leg at an engine is told of where KV is."""
        if self._prefill is None:
            return None
        is_done = self._prefill.done() and not self._prefill.cancelled()
        reference = self._prefill.result() if is_done else self._expected
        if reference is not None:
            member.handed.add(self._prefill_url)
        return reference

    def _note(self, member: Member, error: EngineError) -> None:
        """An engine has failed this request."""
        if error.is_stale and member.url not in self._retried:
            self._retried.add(member.url)  # the connection had ended; the next one is new
        elif error.counts or isinstance(error, AnswerError) or member.is_draining is False:
            self._failed.add(member.url)
        if not error.is_stale or member.url in self._failed:
            self._core.failed(member, error)
        self._is_anyone_there |= not error.is_dead
        if isinstance(error, AnswerError):
            self._last = error
        self._core.metrics.legs.labels("decode", "failed" if error.counts else "moved").inc()

    async def _attempt(self, member: Member) -> tuple[web.StreamResponse, str]:
        """Ask an engine for the answer, or the rest of it. Raises EngineError if it does not give that."""
        turn, transcript = self._turn, self._transcript
        leg = Leg(lambda: transcript.can_go_on)
        member.legs.add(leg)
        member.begin()
        tokens = 0 if self._prefill is not None else turn.request.num_tokens
        member.prompt_tokens += tokens
        try:
            if turn.is_stream:
                return await self._stream(member, leg)
            return await self._whole(member, leg)
        finally:
            member.prompt_tokens -= tokens
            member.legs.discard(leg)
            member.forgotten()

    async def _whole(self, member: Member, leg: Leg) -> tuple[web.StreamResponse, str]:
        core = self._core
        url, body = f"{member.url}{self._turn.request.path}", self._turn.decode_body(self._reference(member))
        is_fresh = member.url in self._retried
        told = await core.upstreams.whole(
            url, self._headers, body, leg, core.settings.answer_seconds, is_fresh
        )
        if told.status == 200:
            self._check_whole(member, told)
        self._succeeded(member, told.status == 200)
        core.metrics.first_byte.labels(self._turn.request.path).observe(core.now() - self._begun)
        return await self._exchange.finish(told), "answered" if told.status == 200 else "refused"

    def _check_whole(self, member: Member, told: Answer) -> None:
        try:
            answer = msgspec.json.decode(told.body)
        except (ValueError, RecursionError):
            raise EngineError("its answer is not JSON") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            raise EngineError("its answer has no choices")
        if not answer["choices"] or not all(map(_is_whole, answer["choices"])):
            raise EngineError("its answer is not whole")

    async def _stream(self, member: Member, leg: Leg) -> tuple[web.StreamResponse, str]:
        core, transcript = self._core, self._transcript
        body: bytes | None
        if transcript.has_begun:
            await settle(core.upstreams, member, transcript, self._turn, self._headers)
            if not transcript.can_go_on:
                return await self._break_off()
            body = transcript.continuation()
            if body is None:
                await self._exchange.send(b"".join(transcript.tail()))
                return await self._exchange.end(), "continued"
        else:
            body = self._turn.decode_body(self._reference(member))
        is_continued = transcript.has_begun
        transcript.begin_leg()
        url = f"{member.url}{self._turn.request.path}"
        async with (
            timed(leg, core.settings.first_byte_seconds),
            core.upstreams.request(
                "POST", url, self._headers, body, is_fresh=member.url in self._retried
            ) as response,
        ):
            if response.status != 200:
                told = Answer(
                    response.status, returned(response.headers), await core.upstreams.read(response)
                )
                raise_for(told.status, told.body, response.content_type)
                if is_continued:  # another engine has taken the request: this one is not like it
                    raise EngineError(f"it refuses the rest: status {told.status}", counts=False)
                self._succeeded(member, False)
                return await self._exchange.finish(told), "refused"
            if response.content_type != "text/event-stream":
                raise EngineError(f"its answer is {response.content_type}, not a stream")
            events, headers = Events(core.settings.max_answer_bytes), returned(response.headers)
            async for data in response.content.iter_any():
                await self._pass_on(data, events, headers, member, leg)
                if transcript.is_cut or transcript.is_done:
                    break
        if not transcript.is_done:
            if not transcript.is_finished or not transcript.is_known:
                raise EngineError("the stream ended before the answer")
            await self._exchange.send(b"".join(transcript.tail()))
        self._succeeded(member, True)
        if is_continued:
            core.metrics.continued.labels("whole").inc()
        return await self._exchange.end(), "continued" if is_continued else "answered"

    async def _pass_on(
        self, data: bytes, events: Events, headers: Mapping[str, str], member: Member, leg: Leg
    ) -> None:
        """Bytes of an engine have come: send the client what they say. Raises EngineError behind that."""
        transcript, out = self._transcript, []
        had_begun, problem = transcript.has_begun, None
        try:
            for whole in events.feed(data):
                inside = data_of(whole)
                if inside is None:
                    if whole.startswith(b":"):
                        out.append(whole)  # a comment that keeps the connection alive
                    continue
                out += transcript.feed(whole, inside)
                leg.heard(self._core.settings.stall_seconds)
                if transcript.is_cut or transcript.is_done:
                    break
        except EngineError as error:
            problem = error
        if transcript.has_begun and not had_begun:
            member.heard()
            path = self._turn.request.path
            if not self._exchange.has_begun:
                self._core.metrics.first_byte.labels(path).observe(self._core.now() - self._begun)
            if self._prefill is not None and not self._prefill.done():
                self._prefill.cancel()  # nobody waits for it any more
        if out:
            leg.pause()
            await self._exchange.send(b"".join(out), headers)
            leg.resume()
        if problem is not None:
            raise problem

    def _succeeded(self, member: Member, is_answer: bool) -> None:
        member.succeeded()
        self._core.metrics.legs.labels("decode", "done" if is_answer else "refused").inc()
        if is_answer:
            self._core.has(member, self._turn.request, self._transcript.tokens)

    async def _give_up(self) -> tuple[web.StreamResponse, str]:
        """No engine is left that has not failed this request."""
        if self._last is not None and not self._exchange.has_begun:
            last = self._last
            return web.Response(
                status=last.status, body=last.body, headers={"Content-Type": last.content_type}
            ), "failed"
        if self._transcript.has_begun:
            return await self._break_off()
        status = 502 if self._is_anyone_there else 503
        message = (
            "every decode engine failed this request" if self._is_anyone_there else "no decode engine lives"
        )
        return await self._exchange.fail(status, message), "failed"

    async def _break_off(self) -> tuple[web.StreamResponse, str]:
        """The answer has begun, and nobody can go on with it."""
        why = self._transcript.broken
        if why is None and self._transcript.can_go_on:
            why = "no other decode engine lives"
        self._core.metrics.continued.labels("broken off").inc()
        message = f"the engine failed, and its answer cannot go on elsewhere: {why or 'a parser is at work'}"
        return await self._exchange.fail(502, message), "broken off"


def _is_whole(choice: object) -> bool:
    """Whether a choice of an answer that is no stream is one, with its end."""
    if not isinstance(choice, dict) or not isinstance(choice.get("finish_reason"), str):
        return False
    is_text = isinstance(choice.get("text"), str) or isinstance(choice.get("message"), dict)
    return is_text and choice["finish_reason"] not in ("abort", "error")
