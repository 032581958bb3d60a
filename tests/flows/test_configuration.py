"""What a user sees before anything runs: mistakes as a block, options as promised, the code package complete."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tests.flows.conftest import FLOWS, Workshop, must, open_workshop

pytestmark = pytest.mark.integration
ALL_FLOWS = ["train_flow.py", "index_flow.py", "evaluate_flow.py"]


@pytest.mark.parametrize("flow", ALL_FLOWS)
def test_mistakes_in_a_config_file_are_shown_with_their_lines_and_no_traceback(flow: str, workshop: Workshop) -> None:
    path = workshop.home / "bad.yaml"
    path.write_text("training:\n  learning_rte: 3\n  max_steps: ten\n")
    result = workshop.flow(flow, "--config", "config", str(path), "run")
    assert result.returncode == 1
    assert "[FT-CFG-001] 2 mistakes" in result.stderr
    assert f"{path}:2:3: unknown key `training.learning_rte`" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert not (workshop.home / "runs").exists()


def test_options_are_flags_and_the_config_sets_their_defaults(workshop: Workshop) -> None:
    config = ["--config-value", "config", "flow: {num_nodes: 5}"]
    text = must(workshop.flow("train_flow.py", *config, "run", "--help")).stdout
    assert "--use-spot-instances  " in text
    assert "--checkpoint-resume  " in text
    assert "[default: 5]" in text


def test_a_mistake_in_an_option_is_shown_without_a_traceback(workshop: Workshop) -> None:
    result = workshop.flow("train_flow.py", "--config-value", "config", workshop.config(), "run", "--num-nodes", "0")
    assert result.returncode == 1
    assert "[FT-CFG-011] --num-nodes 0: expected 1 or more" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_every_step_has_a_description(workshop: Workshop) -> None:
    for flow in ALL_FLOWS:
        lines = must(workshop.flow(flow, "show")).stdout.splitlines()
        assert "?" not in [line.strip() for line in lines]


def test_the_code_package_carries_flextrain(workshop: Workshop) -> None:
    listed = must(workshop.flow("train_flow.py", "package", "list")).stderr
    assert "flextrain/flowkit/gang.py" in listed
    archive, folder = workshop.home / "package.tgz", workshop.home / "package"
    must(workshop.flow("train_flow.py", "package", "save", str(archive)))
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    third_party = Path(pytest.__file__).parents[1]  # `-S`: on the path, but the editable install's hook does not run
    probe = (
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder / '.mf_code')!r}]\n"
        f"sys.path.append({str(third_party)!r})\n"
        "import flextrain.elastic.agent, flextrain.train, flextrain.cli.steps, train_flow\n"
        "print(flextrain.__file__, train_flow.__file__)"
    )
    result = must(
        subprocess.run([sys.executable, "-I", "-S", "-c", probe], cwd=workshop.home, text=True, capture_output=True)
    )
    assert result.stdout.split() == [str(folder / ".mf_code/flextrain/__init__.py"), str(folder / "train_flow.py")]


def test_without_the_package_that_environment_has_no_flextrain(tmp_path: Path) -> None:
    probe = f"import sys; sys.path.append({str(Path(pytest.__file__).parents[1])!r}); import metaflow, flextrain"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", probe], cwd=tmp_path, text=True, capture_output=True)
    assert "No module named 'flextrain'" in result.stderr


def test_flow_files_import_no_torch() -> None:
    for flow in ALL_FLOWS:
        load = f"import sys, runpy; runpy.run_path({str(FLOWS / flow)!r}, run_name='flow')"
        probe = f"{load}; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", probe]).returncode == 0


def test_one_flow_file_serves_laptop_and_cluster(tmp_path: Path) -> None:
    bucket = {"METAFLOW_DEFAULT_DATASTORE": "s3", "METAFLOW_DATASTORE_SYSROOT_S3": "s3://bucket/metaflow"}
    workshop = open_workshop(tmp_path, bucket)
    for kubernetes, steps in (("false", 0), ("true", 7)):
        config = f"flow: {{kubernetes: {kubernetes}}}"
        shown = must(workshop.flow("train_flow.py", "--config-value", "config", config, "show"))
        assert (shown.stdout + shown.stderr).count("@kubernetes") == steps
