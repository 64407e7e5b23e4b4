"""The command line: what it prints and writes, and one line for everything a user can get wrong."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

import muse_attention
from muse_attention.config import MuSeConfig
from muse_lab.benchmark.suite import run_plan
from muse_lab.cli import info, main
from muse_lab.cli.app import app, console, new_table, phases_bar
from muse_lab.cli.language_model import short_warnings
from muse_lab.records.captured_heads import Captures, Origin, save_captures
from tests.command_line import assert_done, assert_refused, run_muse

SHORT_BENCH = ("bench", "--device", "cpu", "--lengths", "512", "--head-dim", "8", "--repeats", "1", "--no-memory")


def _with_output() -> list[tuple[str, ...]]:
    """Every command that has an option for its folder, with what else it needs."""
    needed = {"compare": ("run",), "train": ("corpus",)}
    measuring = [(name,) for name in ("bench", "fidelity", "loss", "tune", "prepare", "demo", "compare", "train")]
    return [(*words, *needed.get(words[0], ())) for words in [*measuring, ("eval", "needles")]]


def test_without_a_command_the_help_is_shown() -> None:
    code, out, _ = run_muse()
    assert code == 0
    for command in ("info", "bench", "demo"):
        assert command in out


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_and_version_do_not_wait_for_pytorch(words: list[str]) -> None:
    code = f"""
import sys
from muse_lab.cli import main
sys.argv = ["muse", *{words}]
try:
    main()
except SystemExit as end:
    assert end.code == 0
heavy = ("torch", "numpy", "transformers", "matplotlib", "triton")
found = [name for name in heavy if name in sys.modules]
sys.exit(f"imported {{found}}" if found else 0)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert muse_attention.__version__ in finished.stdout or "bench" in finished.stdout


def test_every_command_is_listed_and_every_listed_command_is_there() -> None:
    group = get_command(app)
    context = group.make_context("muse", ["info"])
    loaded = {name: group.get_command(context, name) for name in group.list_commands(context)}
    assert all(command.name == name for name, command in loaded.items())
    files = {path.stem for path in Path(info.__file__).parent.glob("*.py")}
    for module in files - {"__main__"}:
        importlib.import_module(f"muse_lab.cli.{module}")
    assert set(get_command(app).commands) == set(loaded)


def test_threads_of_the_command_line_wait_without_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["muse", "--version"])
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    with pytest.raises(SystemExit):
        main()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.raises(SystemExit):
        main()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_mistyped_command_is_answered_by_the_one_that_was_meant() -> None:
    assert_refused(run_muse("trian"), "muse: there is no command 'trian'; did you mean muse train?\n")
    assert_refused(run_muse("eval", "neddles"), "Did you mean 'needles'?")
    assert_refused(run_muse("xyz"), "muse: there is no command 'xyz'; muse --help lists all\n")


def test_a_warning_is_one_line_without_the_stack_of_its_calls(capsys: pytest.CaptureFixture[str]) -> None:
    with short_warnings():
        warnings.simplefilter("always")
        warnings.warn(
            "switching to BLAS:\nno bfloat16\nException raised from mm at /a/b.cpp:338\nframe #0: c10", stacklevel=1
        )
    assert capsys.readouterr().err == "muse: switching to BLAS: no bfloat16\n"


def test_brackets_in_names_mean_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In tables and in the bar of a terminal: documents and folders may have any names."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    name = "[red]id[/green] :smile:"
    with phases_bar() as on_step:
        on_step(f"reading {name}", 1, 2)
    assert f"reading {name}" in capsys.readouterr().err
    table = new_table(name, "attention", name)
    table.add_row(name, name)
    console.print(table)
    assert capsys.readouterr().out.count(name) == 4


def test_info_lists_versions_backends_and_configs() -> None:
    code, out, _ = run_muse("info", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["machine"]["muse_attention"] == muse_attention.__version__
    assert found["machine"]["torch"] == torch.__version__
    assert found["backends"]["torch"] == found["backends"]["reference"] == "available"
    if not torch.cuda.is_available():
        assert found["backends"]["triton"] == "needs a CUDA device"
    assert found["configs"]["64k"] == str(MuSeConfig.for_length(65536))

    code, out, _ = run_muse("info")
    assert code == 0
    assert torch.__version__ in out
    assert found["configs"]["64k"] in out


@pytest.mark.parametrize(
    ("has_device", "has_package", "state"),
    [
        (True, True, "available"),
        (False, True, "needs a CUDA device"),
        (True, False, "needs the package triton"),
        (False, False, "needs a CUDA device"),
    ],
)
def test_info_says_what_triton_needs(
    has_device: bool, has_package: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_device)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if has_package else None)
    assert info._backend_state("triton") == state
    assert info._backend_state("torch") == info._backend_state("reference") == "available"


def test_bench_writes_results_report_and_picture(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    out = assert_done(run_muse(*SHORT_BENCH, "--output", folder, "--name", "short"))
    endings = ("-forward-backward.png", "-forward.png", ".html", ".json", ".md")
    assert sorted(file.name for file in folder.iterdir()) == [f"short{ending}" for ending in endings]
    default = str(MuSeConfig.for_length(512)).partition(",")[0]
    for expected in ("SDPA", default, "block_diagonal:256", "moba:L256B16R1", "wrote"):
        assert expected in out
    results = json.loads((folder / "short.json").read_text())
    assert [case["request"]["attention"] for case in results["cases"]] == ["muse", "block_diagonal", "moba"]
    (command,) = results["commands"]
    assert command.startswith("muse bench --device cpu --length 512 --heads 1 ")
    assert command in (folder / "short.md").read_text()
    for file in ("short.json", "short.md", "short.html"):
        assert str(tmp_path) not in (folder / file).read_text()


def test_bench_continues_what_is_the_same_and_refuses_what_differs(tmp_path: Path) -> None:
    asked = (*SHORT_BENCH, "--output", tmp_path, "--attention")
    assert run_muse(*asked, "exact")[0] == 0
    before = json.loads((tmp_path / "cpu.json").read_text())
    assert run_muse(*asked, "exact,block_diagonal:128")[0] == 0
    after = json.loads((tmp_path / "cpu.json").read_text())
    assert after["cases"][0] == before["cases"][0]
    assert [case["attention"] for case in after["cases"]] == ["exact", "block_diagonal:128"]
    assert len(after["commands"]) == 2
    assert_refused(run_muse(*asked, "exact", "--heads", "3"), "heads was 1, now 3; choose another --name or --output")
    assert json.loads((tmp_path / "cpu.json").read_text()) == after
    assert run_muse(*asked, "exact", "--heads", "3", "--overwrite")[0] == 0
    assert [case["request"]["shape"]["heads"] for case in json.loads((tmp_path / "cpu.json").read_text())["cases"]] == [
        3
    ]


def test_bench_measures_on_captured_heads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 300, 8) for _ in range(3)]
    (tmp_path / "captured").mkdir()
    file = tmp_path / "captured" / "heads.safetensors"
    save_captures(Captures(*tensors, Origin("a model", "a text", ("a", "b"))), file)
    asked = ("bench", "--device", "cpu", "--length", "512", "--attention", "exact", "--repeats", "1", "--no-memory")
    folder = tmp_path / "results"
    captures = ("--captures", file, "--output", folder)
    assert_refused(run_muse(*asked, *captures), "less than 512; choose a smaller --length, or concatenate them")
    assert_done(run_muse(*asked, *captures, "--repeat-captures"))
    results = json.loads((folder / "cpu-heads.json").read_text())
    (case,) = results["cases"]
    assert (case["request"]["shape"]["heads"], case["request"]["shape"]["head_dim"]) == (2, 8)
    assert results["settings"]["captures"]["model"] == "a model"
    (command,) = results["commands"]
    assert "--captures heads.safetensors --repeat-captures" in command
    assert str(tmp_path) not in (folder / "cpu-heads.md").read_text()


def test_bench_writes_to_out_and_not_to_committed_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_muse(*SHORT_BENCH, "--attention", "exact")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "bench" / "cpu.json").exists()


def test_a_sweep_writes_files_that_name_it(tmp_path: Path) -> None:
    asked = (*SHORT_BENCH[:3], "--length", "2100", *SHORT_BENCH[5:], "--sweep", "block-size", "--output", tmp_path)
    out = assert_done(run_muse(*asked))
    name = "cpu-sweep-block-size"
    assert {f"{name}.{ending}" for ending in ("html", "json", "md")} <= {file.name for file in tmp_path.iterdir()}
    assert "2100" in out
    results = json.loads((tmp_path / f"{name}.json").read_text())
    assert results["settings"]["sweep"] == "block-size"
    (case,) = results["cases"]
    assert case["attention"] == "muse:Q128K128R8SP1B2k,clustering=lloyd"
    (command,) = results["commands"]
    assert "--sweep block-size" in command
    assert "--attention" not in command
    assert run_muse(*asked)[0] == 0
    assert json.loads((tmp_path / f"{name}.json").read_text()) == results


def test_an_interrupted_bench_says_how_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        run_plan(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr("muse_lab.cli.bench.run_plan", interrupted)
    code, _, err = run_muse(*SHORT_BENCH, "--output", tmp_path, "--attention", "exact")
    assert code == 130
    assert len(err.strip().splitlines()) == 1
    assert f"what is finished is in {tmp_path / 'cpu.json'}; continue with: muse bench" in err
    assert len(json.loads((tmp_path / "cpu.json").read_text())["cases"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "--lengths", "many"), "cannot read the size 'many'"),
        (("bench", "--attention", "sparse"), "unknown attention 'sparse'"),
        (("bench", "--attention", "muse:X1"), "cannot read 'X1'"),
        (("bench", "--attention", "moba:L8k"), "cannot read 'moba:L8k'"),
        (("bench", "--device", "abacus"), "unknown device 'abacus'"),
        (("bench", "--dtype", "int8"), "unknown dtype 'int8'"),
        (("bench", "--heads", "0"), "heads is 0"),
        (("bench", "--heads", "two"), "--heads"),
        (("bench", "--key-heads", "0"), "key_heads is 0"),
        (("bench", "--heads", "6", "--key-heads", "4"), "6 heads cannot share 4 key heads"),
        (("bench", "--captures", "no.pt"), "there is no file 'no.pt' of captures"),
        (("bench", "--repeat-captures"), "--repeat-captures needs --captures FILE"),
        (("bench", "--repeats", "0"), "repeats is 0"),
        (("bench", "--name", "a/b"), "plain file name"),
        (("bench", "--swiftly"), "--swiftly"),
        (
            ("bench", "--sweep", "colour"),
            "unknown sweep 'colour'; use one of clusters, clusters-and-retrieved, query-clusters, ",
        ),
        (("bench", "--sweep", "heads", "--attention", "muse"), "leave out --attention"),
        (("bench", "--sweep", "block-size", "--lengths", "2k"), "needs a length above 2k"),
        (("bench", "--sweep", "monopole-length", "--lengths", "2k"), "has lengths of its own; leave out --length"),
        (("dance",), "dance"),
    ],
)
def test_every_mistake_is_answered_by_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(run_muse(*arguments), message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        *((*words, "--output", "") for words in _with_output()),
        ("report", ""),
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_current_folder(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(run_muse(*arguments), "it is empty; give a folder, or . for the current one")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_too_long_is_refused() -> None:
    assert_refused(run_muse("fidelity", "9" * 5000), "File name too long")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(run_muse("bench", "--output", tmp_path / "file"), "cannot make the folder")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    assert_refused(run_muse("bench", "--device", "cuda"), "PyTorch finds none here")


def test_without_the_extra_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("muse_lab.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    assert capsys.readouterr().err == (
        "muse: typer is not installed: pip install 'muse-attention[cli]', in a clone pip install '.[cli]'\n"
    )


@pytest.mark.long
@pytest.mark.parametrize("is_installed", [True, False])
def test_commands_start_without_what_only_models_need(is_installed: bool) -> None:
    """Not only where it is missing: importing it takes longer than most of what `muse info` does."""
    heavy = ("transformers", "tokenizers", "huggingface_hub", "torch._dynamo")
    code = f"""
import sys, torch
before = set(sys.modules)
if not {is_installed}:
    sys.modules.update(dict.fromkeys({heavy[:-1]}))
from muse_lab.cli.app import app
for words in (["--help"], ["prepare", "--help"], ["eval", "needles", "--help"], ["info"]):
    app(words, standalone_mode=False)
found = [name for name in {heavy} if name not in before and sys.modules.get(name) is not None]
sys.exit(f"imported {{found}}" if found else 0)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "--vocabulary" in finished.stdout
