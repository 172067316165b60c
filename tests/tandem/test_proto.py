import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]


def test_the_committed_protobuf_code_is_what_the_proto_files_generate(tmp_path):
    sources = sorted(path.relative_to(REPO / "proto") for path in (REPO / "proto").rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto"]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, *(f"proto/{source}" for source in sources)], cwd=REPO, check=True)
    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    assert len(fresh) == 3 * len(sources)
    for name, text in fresh.items():
        assert (REPO / name).read_text() == text, f"{name} is stale: run `make proto`"


def test_no_generated_file_is_left_without_its_proto_file():
    stems = {source.stem for source in (REPO / "proto/tandem/v1").glob("*.proto")}
    generated = {path.name.partition("_pb2")[0] for path in (REPO / "tandem/v1").glob("*_pb2*.py*")}
    assert generated == stems
