"""Who asks a rank, and what each has had: a bound, and who is forgotten."""

from offload.worker.peers.askers import Askers


def test_connections_of_one_engine_are_told_together() -> None:
    askers = Askers()
    first, second = askers.enter("10.0.0.1", ""), askers.enter("10.0.0.1", "")
    other = askers.enter("10.0.0.1", "0123456789abcdef")
    first.questions += 2
    second.questions += 3
    askers.serve(other, 7)
    askers.leave(first)
    told = {(each.host, each.peer): each for each in askers.facts(3)}
    assert all(each.rank == 3 for each in told.values())
    assert (told["10.0.0.1", ""].connections, told["10.0.0.1", ""].questions) == (1, 5)
    assert told["10.0.0.1", "0123456789abcdef"].nbytes == 7
    askers.check_invariants()


def test_who_is_gone_is_forgotten_before_who_is_there() -> None:
    askers = Askers(most=3)
    made = [askers.enter(f"10.0.0.{number}", "") for number in range(3)]
    askers.leave(made[1])
    askers.enter("10.0.0.3", "")
    assert [each.host for each in askers.facts(0)] == ["10.0.0.0", "10.0.0.2", "10.0.0.3"]
    askers.enter("10.0.0.4", "")
    askers.check_invariants()
    assert [each.host for each in askers.facts(0)] == ["10.0.0.2", "10.0.0.3", "10.0.0.4"]


def test_who_comes_again_begins_anew_once_it_was_forgotten() -> None:
    askers = Askers(most=1)
    askers.serve(askers.enter("a", ""), 5)
    askers.enter("b", "")
    askers.serve(again := askers.enter("a", ""), 2)
    assert again.nbytes == 2 and askers.served_bytes == 7
    askers.check_invariants()


def test_an_engine_that_calls_itself_is_no_asker() -> None:
    askers = Askers("0123456789abcdef")
    itself = askers.enter("10.0.0.1", "0123456789abcdef")
    itself.questions += 1
    askers.serve(itself, 7)
    assert askers.served_bytes == 0
    askers.leave(itself)
    assert not askers.facts(0)
    askers.enter("10.0.0.1", "fedcba9876543210")
    assert [each.peer for each in askers.facts(0)] == ["fedcba9876543210"]
    askers.check_invariants()
