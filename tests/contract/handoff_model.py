"""The hand-off between router, prefill and decode worker as an executable specification: a model, checked exhaustively.

    python -m tests.contract.handoff_model                 the protocol as it is built, disaggregated and aggregated
    python -m tests.contract.handoff_model --mutants       without each needed rule in turn: a violation is found
    python -m tests.contract.handoff_model --helpful       without each merely helpful rule in turn: none is found
    python -m tests.contract.handoff_model --off RULE ...  without these rules      --faults N  how much may go wrong

In `handoff/`: `world` has the state and the messages, `router_party`, `prefill_party` and `decode_party` a party each,
`faults` what goes wrong, `steps` what is possible when, `checker` the search, `rules` what can be taken out.

What is left out: several requests and choices (they share nothing but the pools, and these are as small as can be),
incarnation numbers (a crash empties the channels, and every loss raises the attempt), capabilities (nobody forges),
preemption (a reservation covers the whole request, so that no worker preempts yet), D's prefix cache (not used yet).
Time: a timer fires when nothing else can happen, or early, which costs a fault. A way out means that some fair steps
lead out, not that all do. Whoever changes the protocol changes this first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

from tests.contract.handoff.checker import Finding, check
from tests.contract.handoff.rules import HELPFUL, NEEDED


def first_finding(max_faults: int, off: Iterable[str] = (), modes: tuple[bool, ...] = (False, True)) -> Finding:
    """The first problem with 0, 1, ... faults, in either mode: the fewest faults tell the plainest story."""
    num_states = 0
    for faults in range(max_faults + 1):
        for aggregated in modes:
            finding = check(faults, aggregated=aggregated, off=off)
            num_states += finding.num_states
            if finding.problem:
                return finding
    return Finding(num_states)


def report(title: str, max_faults: int, off: Iterable[str], verbose: bool) -> bool:
    """Check and print; whether it holds."""
    began_at = time.monotonic()
    finding = first_finding(max_faults, off)
    verdict = finding.problem or "holds"
    print(f"{title}: {verdict} ({finding.num_states:,} states, {time.monotonic() - began_at:.1f} s)", flush=True)
    if verbose:
        for number, line in enumerate(finding.trace, 1):
            print(f"  {number:3} {line}")
    return not finding.problem


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=2)
    parser.add_argument("--off", action="append", default=[], choices=[*NEEDED, *HELPFUL], metavar="RULE")
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--helpful", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="print no traces")
    args = parser.parse_args()
    if args.mutants or args.helpful:
        rules = NEEDED if args.mutants else HELPFUL
        holds = {rule: report(f"without {rule}", args.faults, {rule}, not args.quiet) for rule in rules}
        wrong = [rule for rule in rules if holds[rule] is args.mutants]
        print("unexpected:", ", ".join(wrong) or "nothing")
        return 1 if wrong else 0
    title = f"without {', '.join(args.off)}" if args.off else "the protocol"
    return 0 if report(title, args.faults, args.off, not args.quiet) else 1


if __name__ == "__main__":
    sys.exit(main())
