from pools.pool import BACKOFF_MAX_S, HEALTHY_AFTER_S, Member, MemberState, Pool, backoff_s, plan
from pools.runtime import ActorInfo, ActorSpec

READY, STARTING, DRAINING, LOST = MemberState.READY, MemberState.STARTING, MemberState.DRAINING, MemberState.LOST


def members(*states: MemberState) -> list[Member]:
    return [Member(f"decode-{i}", i, state) for i, state in enumerate(states)]


def make_pool(target: int = 1) -> Pool:
    return Pool("decode", ActorSpec(object, {}), target)


def test_a_pool_below_its_target_starts_what_is_missing():
    assert plan(3, members(READY), 0.0, 1.0).num_to_start == 2


def test_lost_and_draining_members_do_not_count():
    assert plan(1, members(LOST, DRAINING), 0.0, 1.0).num_to_start == 1


def test_a_starting_member_counts_so_that_it_is_not_started_twice():
    assert plan(1, members(STARTING), 0.0, 1.0).num_to_start == 0


def test_scaling_down_takes_starting_members_first_and_then_the_newest():
    assert plan(2, members(READY, STARTING, READY, READY), 0.0, 1.0).to_drain == ("decode-1", "decode-3")


def test_scaling_to_zero_drains_everyone():
    assert set(plan(0, members(READY, READY), 0.0, 1.0).to_drain) == {"decode-0", "decode-1"}


def test_a_member_that_was_asked_to_drain_is_replaced_and_not_drained_again():
    asked = members(READY, READY)
    asked[0].drain.set()
    decided = plan(2, asked, 0.0, 1.0)
    assert decided.num_to_start == 1
    assert decided.to_drain == ()


def test_during_a_back_off_nothing_starts_and_the_plan_says_when_to_look_again():
    decided = plan(1, [], not_before=5.0, now=1.0)
    assert decided.num_to_start == 0
    assert decided.wake_at == 5.0


def test_the_first_failure_is_replaced_at_once_and_later_ones_wait_twice_as_long_each():
    waits = [backoff_s(n) for n in range(1, 12)]
    assert waits[:4] == [0.0, 0.5, 1.0, 2.0]
    assert waits[-1] == BACKOFF_MAX_S


def test_a_crash_loop_backs_off_and_says_why():
    pool = make_pool()
    for now in (0.0, 1.0, 2.0):
        pool.mark_lost(pool.new_member(), "no such file", now)
    assert pool.not_before > 2.0
    assert "decode-2: no such file; next try in" in pool.detail(2.0)
    assert "3 failures in a row" in pool.detail(2.0)


def test_failures_of_one_wave_count_once():
    pool = make_pool(4)
    wave = [pool.new_member() for _ in range(4)]
    pool.mark_lost(wave[0], "x", 0.0)
    pool.not_before = 1.0
    for member in wave[1:]:
        pool.mark_lost(member, "x", 0.0)
    assert pool.failures_in_a_row == 1
    assert pool.num_losses == 4


def test_a_worker_that_was_well_for_long_is_replaced_at_once_when_it_dies():
    pool = make_pool()
    for now in (0.0, 1.0, 2.0):
        pool.mark_lost(pool.new_member(), "x", now)
    member = pool.new_member()
    pool.mark_ready(member, ActorInfo(1, "a:1"), 10.0)
    pool.mark_lost(member, "killed", 10.0 + HEALTHY_AFTER_S)
    assert pool.not_before <= 10.0 + HEALTHY_AFTER_S


def test_a_lost_member_is_shown_until_its_replacement_serves():
    pool = make_pool()
    lost = pool.new_member()
    pool.mark_lost(lost, "killed", 0.0)
    replacement = pool.new_member()
    assert lost.actor_id in pool.members
    pool.mark_ready(replacement, ActorInfo(1, "a:1"), 1.0)
    assert list(pool.members) == [replacement.actor_id]
    assert pool.detail(1.0) == ""


def test_a_crash_loop_does_not_pile_up_lost_members():
    pool = make_pool()
    for now in range(20):
        pool.mark_lost(pool.new_member(), "x", float(now))
    assert len(pool.members) == 1


def test_names_are_never_used_twice_also_after_adoption():
    pool = make_pool()
    pool.adopt(7)
    assert pool.new_member().actor_id == "decode-8"
