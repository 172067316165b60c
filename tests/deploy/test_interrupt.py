import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from deploy.cli.interrupt import run

async def work():
    try:
        print("started", flush=True)
        await asyncio.sleep(60)
    finally:
        print("cleaning", flush=True)
        await asyncio.sleep(0.5)
        print("clean", flush=True)

try:
    run(work(), lambda: print("patience", flush=True))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""


@pytest.fixture
def program():
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_runs_the_clean_up_to_its_end(program, number):
    program.send_signal(number)
    assert program.stdout.read().split() == ["cleaning", "clean", "interrupted"]
    assert program.wait(10) == 7


def test_an_impatient_second_signal_does_not_break_the_clean_up(program):
    program.send_signal(signal.SIGINT)
    assert program.stdout.readline() == "cleaning\n"
    program.send_signal(signal.SIGINT)
    assert program.stdout.read().split() == ["patience", "clean", "interrupted"]
    assert program.wait(10) == 7
