from rich.console import Console

from deploy.cli.timeline import timeline_line, timeline_table
from tandem.client import WorkerRef
from tandem.types import FinishReason
from tests.support.finishes import make_finish

CROSSED = make_finish(
    FinishReason.LENGTH,
    prefill_worker=WorkerRef("prefill-0", 10, "node"),
    transfer_s=0.004,
    transfer_nbytes=3 * 2**20,
    transport="shm",
    num_chunks=1,
)
LOCAL = make_finish(FinishReason.LENGTH)


def rendered(table) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_line_names_ttft_itl_transfer_and_both_workers():
    line = timeline_line(CROSSED)
    for part in ("10 + 4 tokens", "length", "TTFT 12.3 ms", "ITL 2.1 ms", "KV 3.0 MiB by shm in 4.0 ms"):
        assert part in line
    assert "prefill-0 (pid 10) -> decode-0 (pid 11)" in line


def test_an_answer_that_never_crossed_shows_no_transfer():
    assert "KV" not in timeline_line(LOCAL)
    assert "KV transfer" not in rendered(timeline_table(LOCAL))


def test_a_re_run_is_shown():
    assert "2 attempts" in timeline_line(make_finish(FinishReason.LENGTH, attempts=2))


def test_the_table_shows_where_the_time_went():
    shown = rendered(timeline_table(CROSSED))
    for part in ("TTFT", "KV transfer: 3.0 MiB in 1 chunk by shm", "ITL", "prefill-0 (pid 10)", "decode-0 (pid 11)"):
        assert part in shown
