"""Every equation, figure and table of the paper: where it is implemented, what regenerates it, what was recorded.

`docs/paper.md` is written from this by `paper_page.py`. Paths are those of the repository.
"""

from __future__ import annotations

from dataclasses import dataclass

SRC = "src/muse_attention"
LAB = "src/muse_lab"
REFERENCE = f"{SRC}/backends/reference/paper.py"
TRAINED = "out/muse/model"
"""A model that the commands are written for: any folder of a causal language model will do."""
STANDARD_TASKS = "examples/standard_tasks.py"


@dataclass(frozen=True)
class Equation:
    number: int
    what: str
    files: tuple[str, ...]
    """that compute it; none for what is mathematics alone"""
    tests: tuple[str, ...] = ()
    remark: str = ""


@dataclass(frozen=True)
class Element:
    """A figure or a table."""

    name: str
    title: str
    files: tuple[str, ...]
    commands: tuple[str, ...]
    records: tuple[str, ...] = ()
    recorded: str = ""
    """the result in words, or the reason why there is none; `{loss}` and `{speed}` are read from the records"""
    differs: str = ""
    presets: tuple[str, ...] = ()
    """of `muse fidelity`, whose recorded errors on SmolLM2 stand for the result"""


@dataclass(frozen=True)
class Passage:
    """What the paper says without a number on it."""

    name: str
    files: tuple[str, ...]
    says: str
    differs: str = ""


def _train(recipe: str, changes: str, output: str) -> str:
    return f"muse train out/code --recipe {recipe}{f' {changes}' if changes else ''} --output out/{output}"


def _fidelity(preset: str) -> str:
    return f"muse fidelity {TRAINED} --length 64k --samples 2 --preset {preset}"


def _bench(words: str) -> str:
    return f"muse bench --length 64k {words}"


FIDELITY = (f"{SRC}/fidelity/error.py", f"{LAB}/evaluation/fidelity/presets.py", f"{LAB}/evaluation/fidelity/paper.py")
FITS = f"{LAB}/evaluation/fits.py"
BENCH = (f"{LAB}/benchmark/suite.py", f"{LAB}/benchmark/sweeps.py")
COMPARE = (f"{LAB}/pretraining/recipes.py", f"{LAB}/evaluation/comparison/comparison_report.py")
LOSSES = (
    "benchmarks/pretraining/far-64k/compare.md",
    "benchmarks/pretraining/far-32k/compare.md",
    "benchmarks/pretraining/far-32k-heads-of-128/compare.md",
    "benchmarks/pretraining/far-64k-caution/compare.md",
    "benchmarks/pretraining/far-32k-heads-of-128-caution/compare.md",
)
CODE = "muse prepare ids/ --kind stack --contents mirror/ --output out/code"
PDF = "muse prepare longmino/ --kind dolma --topic science_tech --length-bucket 2e16 --output out/pdf"
STAND_IN = "muse prepare sdists/ --content prose --output out/prose"
CONTINUE = "muse train out/code --continue-from out/muse attention=exact"


def _errors(
    name: str,
    title: str,
    *presets: str,
    bench: str = "",
    records: tuple[str, ...] = (),
    recorded: str = "",
    differs: str = "",
) -> Element:
    """A table of errors: presets of `muse fidelity`, and a sweep of `muse bench` for its times."""
    files = (*FIDELITY, f"{LAB}/evaluation/fidelity/fidelity_report.py", FITS) if "joint" in presets else FIDELITY
    commands = (_fidelity(",".join(presets)), *([_bench(bench)] if bench else []))
    return Element(name, title, files, commands, records, recorded, differs, presets)


EQUATIONS = (
    Equation(
        1, "Z, the normaliser of softmax attention", (f"{SRC}/baselines/exact.py", REFERENCE), ("tests/conformance.py",)
    ),
    Equation(2, "o, its output", (f"{SRC}/baselines/exact.py", REFERENCE), ("tests/conformance.py",)),
    Equation(
        3,
        "exp(q . k) without the product of two residuals",
        (REFERENCE, f"{SRC}/backends/torch/summaries.py"),
        ("tests/conformance.py", "tests/library/test_dipole_order.py"),
        "Tests: exact where a residual is zero, never above exact attention's mass, an error of first order.",
    ),
    Equation(
        4,
        "tilted mean of keys",
        (REFERENCE, f"{SRC}/backends/torch/summaries.py", f"{SRC}/backends/triton/bucket_summaries.py"),
        ("tests/conformance.py",),
    ),
    Equation(
        5,
        "tilted mean of values",
        (REFERENCE, f"{SRC}/backends/torch/summaries.py", f"{SRC}/backends/triton/bucket_summaries.py"),
        ("tests/conformance.py",),
    ),
    Equation(
        6,
        "log-mass of a bucket",
        (REFERENCE, f"{SRC}/backends/torch/summaries.py", f"{SRC}/backends/triton/bucket_summaries.py"),
        ("tests/conformance.py",),
    ),
    Equation(
        7,
        "score of a cluster",
        (REFERENCE, f"{SRC}/backends/torch/selection.py", f"{SRC}/backends/triton/selection.py"),
        ("tests/conformance.py",),
    ),
    Equation(
        8,
        "value of a cluster, expanded in the residual",
        (f"{SRC}/backends/torch/dipole.py",),
        ("tests/library/test_dipole_order.py",),
        "Up to the linear term; the skewness is not computed.",
    ),
    Equation(
        9,
        "mass of a cluster, expanded in the residual",
        (f"{SRC}/backends/torch/summaries.py", f"{SRC}/backends/reference/blockwise.py"),
        ("tests/conformance.py",),
        "The paper keeps the first order. Blockwise MuSe, the default, adds an estimate of the second.",
    ),
    Equation(
        10,
        "error of the monopole",
        (),
        ("tests/library/test_dipole_order.py",),
        "Mathematics; the test measures its order, which is one.",
    ),
    Equation(
        11,
        "bound by the objectives of K-means",
        (),
        (),
        "Mathematics: why queries and keys are clustered separately. Nothing computes it.",
    ),
    Equation(
        12,
        "between-cluster part of the response",
        (REFERENCE, f"{SRC}/backends/torch/far_field.py"),
        ("tests/library/test_dipole_order.py",),
        "It is the softmax over scores; a second-order dipole depends on it.",
    ),
    Equation(
        13,
        "dipole: the linear term of the value",
        (REFERENCE, f"{SRC}/backends/torch/dipole.py"),
        ("tests/library/test_dipole_order.py", "tests/conformance.py"),
    ),
    Equation(
        14,
        "covariances merged by the weights of the centroid",
        (REFERENCE, f"{SRC}/backends/torch/dipole.py"),
        ("tests/library/test_dipole_order.py", "tests/conformance.py"),
    ),
    Equation(
        15,
        "covariance of another tilt",
        (REFERENCE, f"{SRC}/backends/torch/dipole.py"),
        ("tests/library/test_dipole_order.py",),
        "`dipole=shared` (untilted) and `dipole=centred` (one tilt at the mean centroid); their error is of first "
        "order.",
    ),
)

FIGURES = (
    Element(
        "Figure 1",
        "the method: buckets, summaries, accumulation, two selections",
        ("docs/explanation/algorithm.md", "docs_build/algorithm_pictures.py"),
        (),
        ("docs/images/buckets.svg",),
        "Drawn anew from seeded data by `make pictures`.",
    ),
    Element(
        "Figure 2",
        "the geometry of clusters and tilted centroids",
        ("docs_build/algorithm_pictures.py",),
        (),
        ("docs/images/clusters.svg",),
        "Drawn anew from seeded data by `make pictures`.",
    ),
    Element(
        "Figure 3",
        "training loss against wall-clock time, 1B",
        COMPARE,
        (
            _train("paper-s8", "", "muse"),
            _train("paper-s8", "attention=exact", "exact"),
            "muse compare out/exact out/muse --corpus out/code",
        ),
        (
            "benchmarks/pretraining/far-64k-alone/compare-training-seconds.png",
            "benchmarks/pretraining/far-64k-alone/compare.md",
            "benchmarks/pretraining/far-32k-alone/compare.md",
            "benchmarks/pretraining/s3-64k/compare.md",
        ),
        "{speed}",
        "One H200 in place of 8 A100. Seconds are those of updates alone. Both recipes have `deterministic=false`: "
        "exact attention may use cuDNN.",
    ),
    Element(
        "Figure 4",
        "scaling law from 96M to 1B",
        (f"{LAB}/evaluation/comparison/findings.py", f"{LAB}/evaluation/fits.py"),
        (
            "muse compare out/s3 out/s4 out/s5 out/s6 out/s8 --corpus out/code --attention exact",
            *(_train(f"s{scale}", "", f"s{scale}") for scale in (1, 2, 3)),
            "muse compare out/s1 out/s2 out/s3 --corpus out/code --attention exact",
        ),
        (),
        "No record: a law needs several sizes with several seeds each.",
        "`s1` and `s2`, 12M and 36M parameters by the paper's rule, are for a law that one GPU can afford. A continued "
        "run counts for its size if the run that it continues is not given, like the paper's 1B point.",
    ),
    Element(
        "Figure 5",
        "cumulative loss against context, Llama 3.2-1B and 3.1-8B",
        (f"{LAB}/evaluation/loss/curves.py", f"{LAB}/evaluation/loss/loss_report.py"),
        ("muse loss meta-llama/Llama-3.2-1B --download --text pg19/ --length 64k --samples 100 --inside-files",),
        ("benchmarks/pretrained/smollm2-loss.md", "benchmarks/pretrained/smollm2-loss.png"),
        "SmolLM2-135M, two samples of 8k tokens of Python: the gap shrinks by 2.7 per doubling of clusters, and "
        "without tilt it "
        "is 0.70 nats. Llama and PG-19 need a licence and a download.",
        "The paper does not say how many clusters it opens, its block size, or how it fits the irreducible loss.",
    ),
    Element(
        "Figure 6",
        "loss by position during training, both attentions",
        (f"{LAB}/evaluation/comparison/positions.py",),
        (
            _train("paper-s8", "keep=50 checkpoint_every=4000", "muse"),
            "muse compare out/exact out/muse --corpus out/code --checkpoints 5",
        ),
        LOSSES,
        "23M parameters, finished models alone, the default: from positions 1k to 2k to the last half of the window "
        "loss falls by 0.110 to 0.127 nats at 64k (exact training 0.114 to 0.133), by 0.183 to 0.185 at 32k (0.188), "
        "and by 0.205 to 0.213 at 32k with heads of 128 (0.217 to 0.223); three, two and three seeds. With "
        "`Q8K32T0.4B4k,caution=2` 0.109 and 0.118 at 64k (0.111 and 0.117), 0.221 to 0.224 with heads of 128 (0.222 to "
        "0.226); two and three seeds.",
        "Bins are between powers of two; the paper does not print its bins or values.",
    ),
)

TABLES = (
    Element(
        "Table 1",
        "runtime and error of MuSe, MoBA and block-diagonal attention",
        (*BENCH, f"{SRC}/baselines/moba.py", f"{SRC}/baselines/block_diagonal.py"),
        (_bench("--heads 64 --batch 2 --attention muse:paper,moba:L8kB512R1,block_diagonal:8k"), _fidelity("methods")),
        ("benchmarks/speed/cuda-paper-sizes.md", "benchmarks/speed/cuda.md", "benchmarks/error-control/tune-64k.md"),
        "{speed_of_methods}",
        "One sequence and 8 heads on one H200 in place of 2 x 64 heads on 8 A100; errors on synthetic data and on "
        "SmolLM2. The "
        "baseline is what PyTorch's `scaled_dot_product_attention` runs through, cuDNN there. There is no second "
        "exact kernel.",
    ),
    _errors(
        "Table 2",
        "clusters with and without query clustering, 1B",
        "joint",
        bench="--heads 40 --batch 2 --sweep clusters-and-retrieved",
        records=("benchmarks/speed/cuda-clusters-and-retrieved.md",),
        differs="The paper's counts do not follow from its exponents: 0.00622 needs 1714 clusters, it prints 1179.",
    ),
    _errors("Table 3", "summaries alone and retrieval alone, 1B", "monopole", "retrieval-only"),
    Element(
        "Table 4",
        "headline: loss by training and test attention, code and PDF, 1B",
        (*COMPARE, f"{LAB}/pretraining/run/continuing.py"),
        (
            _train("paper-s8", "", "muse"),
            _train("paper-s8", "attention=exact", "exact"),
            f"{CONTINUE} tokens=26M --output out/muse-26M",
            "muse compare out/exact out/muse out/muse-26M --corpus out/code",
            STAND_IN,
            "muse train out/prose --recipe paper-s8 --output out/prose-muse",
            "muse train out/prose --recipe paper-s8 attention=exact --output out/prose-exact",
            "muse compare out/prose-exact out/prose-muse --corpus out/prose",
        ),
        LOSSES,
        "{loss}",
        "The recorded runs have no fine-tuning after them. "
        "The last four commands replace the PDF half, which has no record, by prose from "
        "source archives, with a separate tokenizer.",
    ),
    Element(
        "Table 5",
        "runtime by component",
        (f"{LAB}/benchmark/stages.py",),
        (_bench("--attention muse:paper,muse:Q128K128R8SP1B8k"),),
        ("benchmarks/speed/cuda-paper-sizes.md",),
        "The record has the share of each stage of our kernels at the paper's sizes.",
        "Stages are divided differently: there are no XLA fusions, and sorting belongs to the stage that needs it.",
    ),
    Element(
        "Table 6",
        "loss of five sizes by training and test attention",
        COMPARE,
        (
            *(_train(f"paper-s{scale}", "", f"s{scale}") for scale in (3, 4, 5, 6, 8)),
            "muse compare out/s3 out/s4 out/s5 out/s6 out/s8 --corpus out/code",
        ),
        LOSSES,
        "{loss}",
        "Recipes `s3` to `s8` have Lloyd in place of streaming, and an exact tail; `paper-s3` to `paper-s8` are "
        "the paper's. The "
        "paper calls 356M parameters 350M and 1.07B 1B.",
    ),
    Element(
        "Table 7",
        "MuSe and MoBA in training, 185M and 560M",
        (*COMPARE, f"{SRC}/baselines/moba.py"),
        (
            _train("paper-s4", "", "muse"),
            _train("paper-s4", "attention=moba:L8kB512R1", "moba"),
            _train("paper-s4", "attention=exact", "exact"),
            "muse compare out/exact out/muse out/moba --corpus out/code",
        ),
        (
            "benchmarks/pretraining/16k-baselines/compare.md",
            "benchmarks/pretraining/16k-paper/compare.md",
            *LOSSES,
        ),
        "23M parameters at 16k, minus exact training from the same weights, under exact attention: the paper's method "
        "+0.64 and +0.12%, MoBA +2.91 and +2.83%, means over windows, two seeds each. {loss}",
    ),
    Element(
        "Table 8",
        "head dimension 128, 185M",
        (f"{LAB}/pretraining/recipes.py", f"{LAB}/pretraining/model/configuration.py"),
        (
            _train("paper-s4", "head_dim=128", "muse-128"),
            _train("paper-s4", "head_dim=128 attention=exact", "exact-128"),
            "muse compare out/exact-128 out/muse-128 --corpus out/code",
        ),
        (
            "benchmarks/pretraining/far-32k-heads-of-128/compare.md",
            "benchmarks/pretraining/far-32k-heads-of-128-caution/compare.md",
            "benchmarks/speed/cuda-far32k128-heads.md",
        ),
        "{loss} After exact training the models with four heads of 128 have a loss of 2.06, those with eight of 64 "
        "2.11.",
    ),
    Element(
        "Table 9",
        "needles in code, by kind",
        (
            f"{LAB}/pretraining/needles/samples.py",
            f"{LAB}/evaluation/needles/models_report.py",
            f"{LAB}/pretraining/needles/writer.py",
        ),
        ("muse eval needles out/muse/model --corpus out/code --length 64k --samples-per-depth 280",),
        (
            "benchmarks/needles/16k/s3/seed-1/needles-compared.md",
            "benchmarks/needles/16k/tolerances/needles-over-trainings.md",
            "benchmarks/needles/16k/more-updates/needles-over-trainings.md",
            "benchmarks/needles/16k/tiny/seed-7/needles-compared.md",
            "benchmarks/needles/64k/needles-over-trainings.md",
        ),
        "At 16k with models of 74M, three seeds, and tiny ones that learned from needle documents; at 64k with models "
        "of 74M, two seeds, after 300 updates; see evidence.",
        "The paper's models were not trained on needles; ours are too small and saw too few tokens to retrieve "
        "otherwise. Shares "
        "have Wilson intervals. The paper does not print its prompts.",
    ),
    Element(
        "Table 10",
        "LongBench code completion",
        (STANDARD_TASKS,),
        (f"python {STANDARD_TASKS} {TRAINED} --tasks longbench_repobench-p,longbench_lcc",),
        (),
        "No record: the data set is a download that was not available.",
    ),
    Element(
        "Table 11",
        "frozen aggregation weights, 1B",
        (f"{SRC}/config.py", f"{SRC}/backends/torch/summaries.py", f"{SRC}/backends/triton/accumulation.py"),
        (
            _train("paper-s8", "attention=muse:paper,differentiable_aggregation=false", "frozen"),
            "muse compare out/exact out/muse out/frozen --corpus out/code",
        ),
        (),
        "No record: freezing is for models that adapt to MuSe, and none was seen.",
        "`mu` stays differentiable when aggregation is frozen, so a key still has exact attention's gradient, "
        "spread by fixed weights.",
    ),
    Element(
        "Table 12",
        "runtime against exact attention, 96M",
        BENCH,
        (_bench("--heads 60 --batch 2 --attention muse:QK64R8B8k,muse:QK128R8B8k,muse:QK256R8B8k"),),
        ("benchmarks/speed/cuda-clusters-and-retrieved.md", "benchmarks/speed/cuda-paper-sizes.md"),
        "{speed_of_methods}",
        "As in Table 1.",
    ),
    _errors(
        "Table 13",
        "query clusters",
        "query-clusters",
        bench="--sweep query-clusters",
        differs="The paper's Q = 1 has zeroed centroids, `tilt=false` here; one tilted cluster has a separate row.",
    ),
    _errors("Table 14", "key clusters", "key-clusters", bench="--sweep key-clusters"),
    _errors("Table 15", "query clustering at several counts, 96M", "joint"),
    _errors("Table 16", "summaries alone, 96M", "monopole"),
    _errors(
        "Table 17",
        "clusters with as many retrieved, 96M",
        "fixed-retrieval",
        bench="--sweep clusters",
        differs="The paper's keys per query are all keys of the opened clusters, R N / QK: a column of its own here. "
        "What is attended to token by token is one block of each, an eighth of that.",
    ),
    _errors(
        "Table 18",
        "retrieved clusters, 96M",
        "retrieval-count",
        bench="--sweep retrieved",
    ),
    _errors("Table 19", "retrieval alone, 96M", "retrieval-only"),
    _errors(
        "Table 20",
        "block size with a constant span, 1B",
        "block-size",
        bench="--heads 40 --batch 2 --sweep block-size-of-span",
        records=("benchmarks/speed/cuda-block-size-of-span.md",),
        recorded="The record of errors is from before this preset opened half as many clusters, as the paper does.",
    ),
    _errors("Table 21", "clusters or blocks", "clusters-or-blocks"),
    _errors("Table 22", "clusters with as many retrieved, 1B", "fixed-retrieval", differs="As in Table 17."),
    Element(
        "Table 23",
        "summaries alone: runtime by length",
        BENCH,
        ("muse bench --heads 40 --sweep monopole-length",),
        ("benchmarks/speed/cuda-monopole-length.md",),
        "With 8 heads: 2.31x at 32k, 4.49x at 64k and 8.92x at 128k; the time is the same at each.",
    ),
    Element(
        "Table 24",
        "summaries alone: runtime by clusters",
        BENCH,
        (_bench("--heads 40 --batch 2 --sweep monopole-clusters"),),
        ("benchmarks/speed/cuda-monopole-clusters.md",),
        "With 8 heads, batch 1: 3.34x with 64 clusters, 3.08x with 128, 2.42x with 256.",
    ),
    Element(
        "Table 25",
        "summaries alone: runtime by length, blocks of 16k",
        BENCH,
        ("muse bench --heads 40 --sweep monopole-length-16k",),
        ("benchmarks/speed/cuda-monopole-length-16k.md",),
        "With 8 heads: 1.83x at 32k, 3.51x at 64k, 6.91x at 128k.",
    ),
    Element(
        "Table 26",
        "MoBA with the paper's other budget",
        (f"{SRC}/baselines/moba.py",),
        (
            _train("paper-s4", "attention=moba:L512B512R8", "moba-budget"),
            "muse compare out/exact out/muse out/moba out/moba-budget --corpus out/code",
        ),
        ("benchmarks/pretraining/32k-moba/compare.md",),
        "23M parameters at 32k, `L256B256R8`, under exact attention, minus exact training from the same weights: +1.49 "
        "and +1.59%, two seeds.",
    ),
    _errors(
        "Table 27",
        "error by length",
        "length",
        differs="Up to the length of the model: the paper's 128k are two sequences of 64k, end to end.",
    ),
    _errors(
        "Table 28",
        "clusters without query clustering that are worth as much",
        "joint",
        differs="The numbers of Table 2. A law is extrapolated to at most 16 times the largest measured count.",
    ),
    _errors(
        "Table 29",
        "clusters with query clustering that are worth as much",
        "joint",
        recorded="The record is older than this table.",
    ),
    Element(
        "Table 30",
        "ARC-Easy and SciQ",
        (STANDARD_TASKS,),
        (f"python {STANDARD_TASKS} {TRAINED} --tasks arc_easy,sciq",),
        (),
        "No record: the data sets are downloads that were not available.",
    ),
    Element(
        "Table 31",
        "RULER",
        (STANDARD_TASKS,),
        (f"python {STANDARD_TASKS} {TRAINED} --tasks 'niah_*' --metadata '{{\"max_seq_lengths\": [65536]}}'",),
        (),
        "No record: most of its tasks hide needles in essays, a download that was not available.",
        "MuSe can read the prompt too (`--attention`); decoding is always exact. The paper tests with exact "
        "attention alone.",
    ),
    Element(
        "Table 32",
        "needles in code, by depth",
        (f"{LAB}/evaluation/needles/needle_report.py", f"{LAB}/evaluation/needles/panels.py"),
        (
            "muse eval needles out/muse/model --corpus out/code --length 64k --kind "
            "single,multi-key-2,multi-key-4 --samples-per-depth 280",
        ),
        ("benchmarks/needles/16k/s3/seed-1/needles-compared.md", "benchmarks/needles/64k/needles-over-trainings.md"),
        "At 16k and 64k; see Table 9.",
    ),
    Element(
        "Table 33",
        "fine-tuning with exact attention",
        (f"{LAB}/pretraining/run/continuing.py", f"{LAB}/evaluation/comparison/further.py"),
        (
            f"{CONTINUE} steps=200 --output out/muse-26M",
            "muse train out/code --continue-from out/muse-26M steps=1400 --output out/muse-210M",
            "muse compare out/exact out/muse out/muse-26M out/muse-210M --corpus out/code",
        ),
        (),
        "No record with the present default.",
        "26M and 210M tokens are 200 and 1600 updates of the paper's recipe. "
        "The paper does not give the learning rate: here it stays "
        "at the end of the "
        "cosine, with both moments kept.",
    ),
)

PASSAGES = (
    Passage(
        "Algorithm 1",
        (
            REFERENCE,
            f"{SRC}/backends/protocol.py",
            f"{SRC}/backends/torch/far_field.py",
            f"{SRC}/backends/triton/far_field.py",
        ),
        "the whole of it, line by line in the reference",
    ),
    Passage(
        "Causal accumulation (3.1)",
        (f"{SRC}/backends/torch/summaries.py", f"{SRC}/backends/triton/accumulation.py"),
        "exclusive, over the blocks before",
        "The default accumulates nothing: a query sees a summary of every bucket of every block before.",
    ),
    Passage(
        "Two-level retrieval (3.2)",
        (
            f"{SRC}/backends/torch/selection.py",
            f"{SRC}/backends/torch/retrieval.py",
            f"{SRC}/backends/triton/retrieval.py",
        ),
        "clusters by accumulated summaries, blocks by their own",
        "By default a tolerance decides which buckets are retrieved, in one level, which is ours; `muse:paper` has the "
        "paper's rule.",
    ),
    Passage(
        "Output merging (3.3)",
        (f"{SRC}/core/merging.py", f"{SRC}/backends/triton/merging.py"),
        "one softmax; parts merge by logsumexp",
    ),
    Passage(
        "Dipoles against retrieval (B)",
        (f"{SRC}/backends/torch/dipole.py", "benchmarks/pretrained/smollm2-2k-dipole.md"),
        "`muse fidelity out/muse/model --length 64k --samples 2 --preset dipole`",
        "On SmolLM2 at 2k, 64 clusters, without a limit on clusters of queries: RSE 0.0138 with summaries alone, "
        "0.0119 with tilted dipoles, 0.71 with the paper's shared ones, 0.00325 with retrieval. The paper's own model "
        "has 0.0227, 0.0150 (shared) and 0.00622. Dipoles have no kernels.",
    ),
    Passage(
        "Streaming K-means (C)",
        (f"{SRC}/backends/torch/clustering.py", f"{SRC}/backends/triton/streaming.py"),
        "shuffle, every N/K-th vector, minibatches of 64, decay 0.9",
        "`auto` is Lloyd on a sample, which is parallel; on SmolLM2 neither is clearly better.",
    ),
    Passage(
        "Balanced assignment (C)",
        (f"{SRC}/backends/torch/clustering.py", f"{SRC}/backends/triton/balancing.py"),
        "at most 4 B / K vectors of a cluster in a block",
        "Where the paper says nothing, overflow goes to the next-nearest centroid that has room, lowest position "
        "first. Queries have no limit unless `muse:paper` is asked for: it has up to twice the error on a "
        "pretrained model.",
    ),
    Passage(
        "Gradient flow (C)",
        (f"{SRC}/backends/torch/summaries.py", f"{SRC}/backends/torch/far_field.py"),
        "none through centroids; through aggregation weights by choice (`differentiable_aggregation`)",
    ),
    Passage(
        "Model (D)",
        (f"{LAB}/pretraining/model/decoder.py", f"{LAB}/pretraining/model/configuration.py"),
        "sizes, RoPE base, window, norms",
        "Neither biases nor initialisation are given: no biases, GPT-2's initialisation.",
    ),
    Passage(
        "Optimiser (D)",
        (f"{LAB}/pretraining/optimiser.py", f"{LAB}/pretraining/schedule.py"),
        "AdamW, clipping, warm-up and cosine",
        "All weights decay, as the paper names none that do not.",
    ),
    Passage(
        "Data (D)",
        (
            f"{LAB}/pretraining/data/datasets.py",
            f"{LAB}/pretraining/data/dataset_files.py",
            f"{LAB}/pretraining/data/corpus_documents.py",
            f"{LAB}/pretraining/data/prepare.py",
        ),
        f"The Stack v2 by `{CODE}`, LongMino by `{PDF}`; what is too large is left out of both",
        f"Both are downloads: the recorded runs learned from 382 packages of the Python index. `{STAND_IN}` takes the "
        "documentation and texts out of source archives: a stand-in for scientific documents, no more. In a second "
        "epoch samples are in another order.",
    ),
    Passage(
        "Hardware (D)",
        (f"{LAB}/pretraining/mesh_shape.py", f"{LAB}/pretraining/parallel.py"),
        "`mesh=2x4`, data x sequence: groups of processes share the sequences of an update, the processes of a group "
        "the tokens of each, and all of them the weights (FSDP2)",
        "Tested with gloo on a CPU, on up to eight processes.",
    ),
    Passage(
        "Quality metric (D)",
        (f"{SRC}/fidelity/error.py",),
        "RSE, averaged over queries, then over heads and samples",
        "The paper does not say how it pools, or which correlation it prints: the cosine is taken.",
    ),
    Passage(
        "Distributed training (H)",
        (f"{LAB}/pretraining/parallel.py", f"{SRC}/distributed/ulysses_attention.py", f"{SRC}/distributed/remote.py"),
        "the trainer splits sequences, and in attention heads, by `ulysses`, which serves one call as well; "
        "`remote_attention` splits keys",
        "Ring attention is future work in the paper; here it is an example.",
    ),
)
