import pytest

from kvtransfer.leases import LeaseTable
from tandem.types import AttemptKey, RequestKey
from tests.support.fake_parts import FakeClock

LEASE_S = 10.0


def attempt(router: int = 1, request: str = "r", number: int = 1) -> AttemptKey:
    return AttemptKey(router, RequestKey(request, 0, number))


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def leases(clock):
    return LeaseTable(LEASE_S, clock)


def test_a_lease_runs_out_after_its_duration(leases, clock):
    leases.grant(attempt())
    clock.now += LEASE_S - 0.001
    assert leases.holds(attempt()) and leases.expired() == []
    clock.now += 0.001
    assert not leases.holds(attempt()) and leases.expired() == [attempt()]


def test_a_message_renews_all_leases_of_its_router_and_of_no_other(leases, clock):
    mine, more, others = attempt(1, "a"), attempt(1, "b"), attempt(2, "a")
    for each in (mine, more, others):
        leases.grant(each)
    clock.now += LEASE_S - 1
    leases.renew_all(1)
    clock.now += 1
    assert leases.expired() == [others]
    clock.now += LEASE_S - 1
    assert set(leases.expired()) == {mine, more, others}


def test_an_expired_lease_is_reported_until_it_is_ended(leases, clock):
    leases.grant(attempt())
    clock.now += LEASE_S
    assert leases.expired() == leases.expired() == [attempt()]
    leases.end(attempt())
    leases.end(attempt())  # idempotent
    assert leases.expired() == [] and len(leases) == 0


def test_a_renewal_before_the_grant_does_not_shorten_the_lease(leases, clock):
    leases.grant(attempt(1, "first"))
    leases.renew_all(1)
    clock.now += 7
    leases.grant(attempt(1, "second"))
    clock.now += 7
    assert leases.expired() == [attempt(1, "first")]


def test_attempts_of_one_request_are_told_apart(leases, clock):
    leases.grant(attempt(number=1))
    clock.now += 5
    leases.grant(attempt(number=2))
    clock.now += 5
    assert leases.expired() == [attempt(number=1)]
    leases.end(attempt(number=1))
    assert leases.holds(attempt(number=2)) and not leases.holds(attempt(number=1))


def test_a_grant_that_is_repeated_starts_anew_and_counts_once(leases, clock):
    leases.grant(attempt())
    clock.now += 9
    leases.grant(attempt())
    clock.now += 9
    assert leases.holds(attempt()) and len(leases) == 1
    leases.end(attempt())
    assert len(leases) == 0


def test_routers_without_leases_leave_nothing_behind(leases):
    for router in range(100):
        leases.renew_all(router)
        leases.grant(attempt(router))
        leases.renew_all(router)
        leases.end(attempt(router))
        leases.renew_all(router)
    assert leases._renewed_at == {} and not leases._num_of


def test_clocks_that_start_anywhere_work(clock):
    clock.now = -50.0  # monotonic clocks promise no origin
    leases = LeaseTable(LEASE_S, clock)
    leases.grant(attempt())
    clock.now += LEASE_S
    assert leases.expired() == [attempt()]
