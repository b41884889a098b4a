"""The wire between a proxy and an engine leaves nothing open."""

import asyncio
import gc
import warnings

from offload.testing.upstream.wire import Wire


async def answer_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


def test_one_that_stops_while_a_relay_ends_closes_both_sides() -> None:
    """Whatever the relay does, turns of the loop after its client has gone."""

    async def stop_soon(turns: int) -> None:
        async with await asyncio.start_server(answer_nothing, "127.0.0.1", 0) as engine:
            async with Wire(engine.sockets[0].getsockname()[1]) as wire:
                _, writer = await asyncio.open_connection("127.0.0.1", wire.port)
                writer.write(b"ask")
                await asyncio.sleep(0.01)
                writer.close()
                for _ in range(turns):
                    await asyncio.sleep(0)
            await asyncio.sleep(0.01)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        for turns in range(20):
            asyncio.run(stop_soon(turns))
        gc.collect()
    assert [str(each.message) for each in told if each.category is ResourceWarning] == []
