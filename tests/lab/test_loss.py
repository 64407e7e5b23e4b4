"""`muse loss`: the loss of a model at every position, what is derived from it, its files, and one line for mistakes."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GraniteConfig, GraniteForCausalLM

from muse_attention.registry import full_name
from muse_lab.evaluation.fidelity.presets import find_presets
from muse_lab.evaluation.fits import Decay, PowerLaw
from muse_lab.evaluation.loss import positions as loss
from muse_lab.evaluation.loss.curves import binned, cumulative_mean, fit_exact, gap, ratios_per_doubling
from muse_lab.evaluation.loss.loss_report import has_leak
from muse_lab.evaluation.loss.positions import Losses, LossResults, figure_attentions, measure, position_losses
from muse_lab.evaluation.settings import TextSettings, take_fingerprint
from muse_lab.records.attention_names import block_size_of, in_words
from tests.command_line import assert_done_quietly, assert_refused, run_muse
from tests.models import SIZES, tiny_llama, token_ids

COARSE = "muse:Q4K4R1SP1B32,clustering=lloyd"
BOTH = ("exact", COARSE)
SETTINGS = TextSettings("tiny", "letters", 128, 2, "cpu", "float32")
run = functools.partial(run_muse, "loss")


def expected_losses(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")


# The loss


def test_the_loss_under_exact_attention_is_that_of_the_logits() -> None:
    model, ids = tiny_llama(), token_ids(200)[0]
    torch.testing.assert_close(position_losses(model, ids, "exact"), expected_losses(model, ids))


@pytest.mark.filterwarnings("ignore::muse_attention.huggingface.ExactAttentionWarning")
@pytest.mark.parametrize("name", ["muse:QK4R1B256", "muse:QK4R4SP8B32"])
def test_muse_that_attends_to_everything_has_the_same_loss(name: str) -> None:
    """In one block, or because every bucket is retrieved."""
    model, ids = tiny_llama(), token_ids(200)[0]
    torch.testing.assert_close(position_losses(model, ids, name), expected_losses(model, ids))


def test_the_first_block_is_exact_and_the_rest_is_not() -> None:
    model, ids = tiny_llama(), token_ids(128)[0]
    difference = (position_losses(model, ids, COARSE) - expected_losses(model, ids)).abs()
    assert difference[:32].max() < 1e-9
    assert difference[32:].max() > 1e-3


@pytest.mark.parametrize("at_once", [1, 7, 64, 1000])
def test_how_many_logits_there_are_at_once_does_not_matter(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_llama(), token_ids(65)[0]
    monkeypatch.setattr(loss, "_POSITIONS_AT_ONCE", at_once)
    torch.testing.assert_close(position_losses(model, ids, "exact"), expected_losses(model, ids))


def test_low_precision_has_its_softmax_in_float32() -> None:
    model, ids = tiny_llama().to(torch.bfloat16), token_ids(64)[0]
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].float()
    torch.testing.assert_close(
        position_losses(model, ids, "exact"), cross_entropy(logits, ids[1:], reduction="none").double()
    )


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    scaled = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)).eval()
    with pytest.raises(ValueError, match="GraniteForCausalLM does more to its logits"):
        measure(scaled, token_ids(128, batch=2), BOTH, LossResults({}, SETTINGS), tmp_path / "loss.json")


def test_a_loss_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "position_losses", lambda *arguments: torch.full((127,), torch.nan))
    with pytest.raises(ValueError, match=r"not a finite number in torch\.float64; use another dtype"):
        measure(tiny_llama(), token_ids(128, batch=2), BOTH, LossResults({}, SETTINGS), tmp_path / "loss.json")
    assert list(tmp_path.iterdir()) == []


# Files


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    model, tokens = tiny_llama(), token_ids(128, batch=2)
    whole, parted = tmp_path / "whole.json", tmp_path / "parted.json"
    measure(model, tokens, BOTH, LossResults.start(SETTINGS, whole), whole)
    interrupt = Mock(side_effect=[None, None, None, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        measure(model, tokens, BOTH, LossResults.start(SETTINGS, parted), parted, on_step=interrupt)
    part = LossResults.read(parted)
    assert part.whole == ["exact"]
    assert part.missing(BOTH) == [(1, COARSE)]
    measure(model, tokens, BOTH, LossResults.start(SETTINGS, parted), parted)
    assert parted.read_bytes() == whole.read_bytes()
    assert LossResults.read(whole).whole == list(BOTH)


def test_fingerprints_tell_weights_and_tokens_apart() -> None:
    model, tokens = tiny_llama(), token_ids(64)
    found = take_fingerprint(model, tokens)
    assert take_fingerprint(model, tokens.clone()) == found
    assert take_fingerprint(model, tokens.flip(1)) != found
    assert take_fingerprint(tiny_llama(), tokens) != found


def test_losses_of_another_length_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    LossResults({}, SETTINGS, [], {"exact": Losses([1.0], [1.0] * 126)}).write(path)
    with pytest.raises(ValueError, match="does not hold the results of muse loss"):
        LossResults.read(path)


# What is derived


def made_up(**gaps: float) -> LossResults:
    """Losses of a known decay, and attentions a constant above them, a little more in the second sample."""
    position = torch.arange(1, 1024, dtype=torch.float64)
    cumulative = 2 + 3 * position**-0.5
    exact = torch.diff(cumulative * position, prepend=torch.zeros(1, dtype=torch.float64))
    results = LossResults({}, TextSettings("tiny", "letters", 1024, 2, "cpu", "float32"))
    for name, above in {"exact": 0.0, **gaps}.items():
        losses = results.losses[name] = Losses()
        losses.add(exact + above)
        losses.add(exact + 1.5 * above)
    return results


def test_curves_bins_and_gaps_of_known_losses() -> None:
    results = made_up(moba=0.2)
    curve = cumulative_mean(results, "exact")
    assert [float(curve[0]), float(curve[99])] == pytest.approx([5, 2.3])
    fit = fit_exact(results)
    assert (fit.irreducible, fit.exponent) == (pytest.approx(2, abs=0.02), pytest.approx(0.5, rel=0.03))
    found = gap(results, "moba")
    assert (found.mean, found.standard_error) == (pytest.approx(0.25), pytest.approx(0.05))
    bins = binned(results, "exact")
    assert [(part.first, part.last) for part in bins] == [(2**n, 2 ** (n + 1) - 1) for n in range(10)]
    assert sum((part.last - part.first + 1) * part.loss for part in bins) == pytest.approx(1023 * float(curve[-1]))


def test_gaps_are_compared_where_clusters_and_retrieval_double() -> None:
    names = ["muse:Q16K16R1SP1B64", "muse:Q32K32R2SP1B64", "muse:Q64K64R4SP1B64", "muse:Q1K32R2SP1B64"]
    results = made_up(**dict(zip(names, [0.4, 0.2, 0.05, 0.3], strict=True)))
    assert ratios_per_doubling(results) == pytest.approx([2, 4])
    no_better = made_up(**dict(zip(names[:2], [0.4, 0.0], strict=True)))
    assert ratios_per_doubling(no_better) == [None]


def test_a_decay_is_recovered() -> None:
    fit = Decay.fit([(x, 1.7 + 2.5 * x**-0.4) for x in (32, 64, 128, 256, 1024, 4096)])
    assert (fit.irreducible, fit.factor, fit.exponent) == pytest.approx((1.7, 2.5, 0.4), rel=0.02)
    assert Decay.fit([(1, 1.0), (2, 2.0), (3, 3.0)]).factor == 0  # what does not fall has nothing to remove
    with pytest.raises(ValueError, match="three points"):
        Decay.fit([(1, 1), (2, 1)])


def test_a_power_law_is_recovered() -> None:
    fit = PowerLaw.fit([(x, 3 * x**-0.65) for x in (16, 32, 128)])
    assert (fit.factor, fit.exponent) == pytest.approx((3, -0.65))
    assert fit.where(fit(50)) == pytest.approx(50)
    assert fit.r_squared([(x, fit(x)) for x in (16, 32, 128)]) == pytest.approx(1)
    with pytest.raises(ValueError, match="two points"):
        PowerLaw.fit([(1, 1)])
    uneven = torch.tensor([(10, 1.0), (100, 0.7), (1000, 0.75)], dtype=torch.float64)
    correlation = torch.corrcoef(uneven.log().T)[0, 1]
    assert PowerLaw.fit(uneven.tolist()).r_squared(uneven.tolist()) == pytest.approx(float(correlation**2))


def test_the_attentions_of_the_figure() -> None:
    configs = ["Q16K16R1", "Q32K32R2", "Q64K64R4", "Q128K128R8", "Q1K32R2"]
    named = [*(f"{config}SP1B1k" for config in configs), "Q32K32R2SP1B1k,tilt=false"]
    expected = ["exact", *(f"muse:{config},clustering=lloyd" for config in named)]
    assert list(figure_attentions(8192)) == expected
    assert figure_attentions(256)[1] == "muse:Q8K8R1SP1B256,clustering=lloyd"
    assert full_name("muse:QK32R2B1k", 8192) == "muse:Q32K32R2SP1B1k,clustering=lloyd"
    assert "one tilted query cluster, 32 key clusters, 2 opened" in in_words(expected[5])
    assert "no tilt" in in_words(expected[6])
    assert in_words("muse:QK16R2B1k,differentiable_aggregation=false").endswith("blocks of 1k, frozen aggregation")
    assert in_words("muse:Q16K64T0.1B1k") == (
        "16 query clusters, 64 key clusters of each block, retrieval of what is expected to be off by 0.1 or more, "
        "blocks of 1k"
    )
    assert in_words("muse:Q16K64R8T0.01B1k,caution=2.0") == "an earlier form of MuSe"
    assert block_size_of("muse:Q16K64R8T0.01B1k,caution=2.0") == 1024


# The command


@pytest.fixture
def asked(folder: Path, tmp_path: Path) -> list[object]:
    text = folder.parent / "text.txt"
    arguments = [folder, "--text", text, "--length", "128", "--samples", "2", "--attention", "muse:QK4R1B32"]
    return [*arguments, "--device", "cpu", "--output", tmp_path / "out"]


def test_only_muse_without_a_tolerance_has_a_leak() -> None:
    assert [has_leak(name) for name in ("exact", "muse:Q4K4T0.1B32", COARSE)] == [False, False, True]


def test_attentions_of_a_preset_of_muse_fidelity(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("muse_lab.cli.loss.measure", interrupted)
    assert run(*asked, "--preset", "error-control")[0] == 130
    (preset,) = find_presets(["error-control"], 128)
    named = ["exact", full_name("muse:QK4R1B32", 128)]
    assert interrupted.call_args.args[2] == [*named, *(request.attention for request in preset.requests)]
    assert_refused(run(*asked, "--preset", "nonsense"), "unknown preset 'nonsense'; use all, or any of methods")


def test_the_command_writes_results_and_reports(asked: list[object], tmp_path: Path) -> None:
    out = assert_done_quietly(run(*asked))
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["tiny.html", "tiny.json", "tiny.md", "tiny.png"]
    for expected in ("exact", "Q4K4R1SP1B32", "wrote", "tiny.html"):
        assert expected in out
    assert "MuSe without a tolerance clusters the whole sequence" in " ".join(out.split())
    document = json.loads((tmp_path / "out" / "tiny.json").read_text())
    (command,) = document["commands"]
    assert command == (
        f"muse loss tiny --text text.txt --length 128 --samples 2 --attention exact --attention {COARSE} "
        "--device cpu --dtype float32 --name tiny"
    )
    for name in ("tiny.md", "tiny.html"):
        report = (tmp_path / "out" / name).read_text()
        for expected in (command, COARSE, "2.30", "1.96", "~1.8x", "path from the future", "2 x 127 positions"):
            assert expected in report
    assert "data:image/png;base64" in (tmp_path / "out" / "tiny.html").read_text()
    for file in files:
        assert str(tmp_path).encode() not in file.read_bytes()


@pytest.mark.long
def test_the_command_continues_what_is_the_same_and_refuses_what_differs(
    asked: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*asked, "--name", "whole")[0] == 0

    def interrupted(*arguments: Any, on_step: Any, **options: Any) -> None:
        measure(*arguments, on_step=Mock(side_effect=[None, KeyboardInterrupt]), **options)

    with monkeypatch.context() as patch:
        patch.setattr("muse_lab.cli.loss.measure", interrupted)
        outcome = run(*asked, "--name", "parted")
    assert_refused(outcome, "interrupted; what is finished is in ", code=130)
    words = outcome[2].rstrip().partition("continue with: muse loss ")[2].split()
    assert run(*words)[0] == 0
    whole, parted = (json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("whole", "parted"))
    assert parted["losses"] == whole["losses"]
    path = tmp_path / "out" / "whole.json"
    before = path.read_bytes()
    refused = "whole.json has other results: samples was 2, now 1"
    assert_refused(run(*asked, "--name", "whole", "--samples", "1"), refused)
    assert path.read_bytes() == before
    path.write_text("{")
    assert_refused(run(*asked, "--name", "whole"), "does not hold the results of muse loss; choose another --name or")
    assert run(*asked, "--name", "whole", "--samples", "1", "--overwrite")[0] == 0
    assert LossResults.read(path).settings.samples == 1


@pytest.mark.parametrize("name", ["tiny.json", "tiny.md", "tiny.html"])
def test_a_full_disk_leaves_what_was_whole(
    asked: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert run(*asked)[0] == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    synchronise = os.fsync

    def full(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.startswith(f"{name}."):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synchronise(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("the name of an open file is needed")
    monkeypatch.setattr(os, "fsync", full)
    code, _, err = run(*asked, "--overwrite")
    assert code == 1
    assert len(err.splitlines()) == 1
    what = "the earlier results in" if name == "tiny.json" else "what is finished is in"
    assert f"{name}: No space left on device; {what} {tmp_path / 'out' / 'tiny.json'}" in err
    assert err.rstrip().endswith(" --overwrite") == (name == "tiny.json"), "finished results are continued"
    after = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert after.keys() == before.keys()
    assert after[name] == before[name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--attention", "sparse"), "unknown attention 'sparse'"),
        (("--attention", "muse:X1"), "cannot read 'X1'"),
        (("--length", "many"), "cannot read the size 'many'"),
        (("--length", "32"), "too short for a curve; choose at least 64"),
        (("--length", "512"), "too few for 2 samples of 512: give more text, fewer samples or a smaller length"),
        (("--length", "2k", "--text", "{long}"), "the model's context is 1024 tokens, less than 2048"),
        (("--samples", "0"), "cannot measure 0 samples"),
        (("--text", "nowhere.txt"), "there is no text 'nowhere.txt'"),
        (("--device", "abacus"), "unknown device 'abacus'"),
        (("--dtype", "int8"), "unknown dtype 'int8'"),
        (("--name", "a/b"), "plain file name"),
        (("--loudly",), "--loudly"),
    ],
)
def test_every_mistake_is_answered_by_one_line(
    asked: list[object], tmp_path: Path, changes: tuple[str, ...], message: str
) -> None:
    long = tmp_path / "long.txt"
    long.write_text("a long text " * 400)
    assert_refused(run(*asked, *(change.format(long=long) for change in changes)), message)
    assert not (tmp_path / "out").exists()


def test_an_unfinished_run_has_no_report(asked: list[object], tmp_path: Path) -> None:
    assert run(*asked)[0] == 0
    path = tmp_path / "out" / "tiny.json"
    document = json.loads(path.read_text())
    for entry in document["losses"]:
        entry["means"] = entry["means"][:1]
    path.write_text(json.dumps(document))
    before = (tmp_path / "out" / "tiny.md").read_text()
    assert_refused(run_muse("report", path), "exact attention has not seen all samples yet")
    assert (tmp_path / "out" / "tiny.md").read_text() == before


def test_a_model_that_is_not_there_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(run("llama-9"), "there is no model folder 'llama-9'")
    shutil.copytree(folder, "broken")
    Path("broken/model.safetensors").write_bytes(b"nonsense")
    assert_refused(run("broken"), "cannot load a language model from broken")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert_refused(run("broken"), "pip install 'muse-attention[huggingface]'")
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken"]


def test_too_little_memory_is_one_line(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr("muse_lab.cli.loss.measure", fail)
    assert_refused(run(*asked), "out of memory; nothing was written; continue with: muse loss ", code=1)


def test_samples_can_stay_inside_files(folder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_text(f"file {number} " * 40)
    words = ("--text", texts, "--length", "64", "--attention", "exact", "--output", tmp_path)
    out = assert_done_quietly(run(folder, *words, "--samples", "3", "--inside-files"))
    assert "without a tolerance" not in out
    (path,) = tmp_path.glob("*.json")
    assert LossResults.read(path).settings.text == "texts, each sample inside one file"
