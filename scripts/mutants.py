#!/usr/bin/env python3
"""Break the code in known ways, one at a time, and tell which tests notice.

    scripts/mutants.py                     every fault of the table
    scripts/mutants.py NAME ...            these faults
    scripts/mutants.py --list              their names, files and tests

Faults are made in a temporary worktree of HEAD, never in the user's files. Only the tests that the table lists for a
fault's file run, so the whole suite may notice more. They first run without a fault. For each fault those of the
default suite run until one fails; if none fails, the slow ones run too. A run that takes longer than --limit counts as
noticed. The exit status is 1 if a fault is unnoticed.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
DEFAULT, SLOW = ("-m", "not slow"), ("-m", "slow")
NO_TESTS = 5  # pytest's status where nothing is selected
GRACE = 10.0  # seconds from SIGTERM to SIGKILL

# A line "# file: tests" comes before the faults of a file, each "name: text of the file => its substitute". The text
# must be in the file exactly once; it may be a part of a line.
TABLE = r"""
# mixhead_plugin/ops/normalizers.py: tests/ops/test_normalizers.py
sigsoftmax-sign: F.logsigmoid(scores).add_(scores) => F.logsigmoid(-scores).add_(scores)
swish-not-shifted: torch.exp(scores - largest. => torch.exp(scores - 0 * largest.
zero-by-zero: total = total.masked_fill(total == 0, float("inf")) => pass
softmax-of-a-row-without-keys: return weights if visible is None else weights * visible => return weights
relu2-counts-hidden-keys: (scores != float("-inf")).sum( => (scores == scores).sum(
gradient-of-short-rows: torch.sub(d_weights, torch.linalg => torch.add(d_weights, torch.linalg
sigmoid-without-the-number-of-keys: shifted = scores - _count(scores).clamp_(min=1).log_() => shifted = scores
# mixhead_plugin/ops/masks.py: tests/ops/test_masks.py tests/ops/test_attention.py
causal-sees-one-ahead: .triu(1 + n_keys - n_queries) => .triu(2 + n_keys - n_queries)
padding-inverted: masked_fill(padding[ => masked_fill(~padding[
# mixhead_plugin/ops/api.py: tests/ops/test_attention.py
temperature: query.shape[3] ** -0.5) => query.shape[3] ** -1.0)
failed-kernels-are-taken: or triton.fault(inputs) => or ""
# mixhead_plugin/ops/triton/verify.py: tests/ops/test_triton_verify.py
kernels-are-not-compared: return fault_in(draws) => return ""
only-the-first-tile-is-tried: itertools.product(places, => itertools.product(places[:1],
tried-in-the-thread-of-the-call: return thread.submit(_try, variant).result() => return _try(variant)
# mixhead_plugin/ops/accuracy.py: tests/ops/test_accuracy.py
ten-times-looser: .clamp(min=2) => .clamp(min=20)
parts-are-not-judged: torch.cat([whole, sums], 2) if => whole if
# mixhead_plugin/repairs/fasta_index.py: tests/repairs/test_data_files.py
fasta-by-a-shell: @replaces(FastaDataset, "_build_index") => @replaces(FastaDataset, "__init__")
# mixhead_plugin/ops/reference.py: tests/ops/test_attention.py tests/modules/test_attention.py
mixing-transposed: torch.matmul(mixing.transpose(-2, -1), by_query) => torch.matmul(mixing, by_query)
sink-mixed-with-the-keys: [..., : inputs.key.size(2)] => [..., -inputs.key.size(2) :]
scale-missing: torch.matmul(query * inputs.scale, => torch.matmul(query,
dropout-before-mixing: mixed = mix_heads(apply_gain(
  => weights = F.dropout(weights, inputs.dropout_p);inputs = inputs._replace(dropout_p=0);mixed = mix_heads(apply_gain(
# mixhead_plugin/ops/fused.py: tests/ops/test_attention.py
fused-row-without-keys: return out if unseen is None else out.masked_fill(unseen, 0.0) => return out
# mixhead_plugin/ops/relative.py: tests/ops/test_attention.py
distances-from-the-other-end: key.transpose(1, 2)), [0, n_queries]) => key.transpose(1, 2)), [n_queries, 0])
# mixhead_plugin/ops/blockwise/forward.py: tests/ops/test_attention.py tests/ops/test_blockwise.py
blockwise-dropout-not-rescaled: 1 / (1 - p) if p < 1 else 0.0 => 1.0
blockwise-narrow-product-unscaled: a.transpose(1, 2), alpha).transpose => a.transpose(1, 2)).transpose
blockwise-blocks-drop-alike: (self.seed + block.number) % 2**63 => self.seed % 2**63
# mixhead_plugin/ops/blockwise/backward.py: tests/ops/test_attention.py tests/ops/test_blockwise.py
blockwise-key-gradient-unscaled: d_scores, part.query, steps.scale) => d_scores, part.query, 1.0)
blockwise-mixing-gradient-transposed: torch.bmm(weights, d_mixed.transpose(1, 2), => torch.bmm(d_mixed, weights.mT,
blockwise-query-gradient-of-its-mixing: torch.mm(rows, part.mixing_weight.t()).view => query.mul(0).view
blockwise-sink-without-gradient: grads["sink"].copy_( => grads["sink"].sub_(
blockwise-score-mixing-not-transposed-back: mix_arranged(d_arranged, part.score_mixing.transpose(-2, -1)
  => mix_arranged(d_arranged, part.score_mixing
blockwise-relative-gradient-of-old-memory: d_distances.zero_() => pass
blockwise-gain-missing-in-backward: d_weights.view(block.shape).mul_(steps.gain_by_key(block, part.gain)) => pass
# mixhead_plugin/ops/blockwise/plan.py: tests/ops/test_attention.py tests/ops/test_masks.py
blockwise-unwritten-memory: self.complete = bool(self.blocks) and => self.complete = True or
blockwise-last-block-missing: for start in range(0, n, size)] => for start in range(0, n - n % size or n, size)]
# mixhead_plugin/ops/triton/rows.py: tests/ops/test_triton.py
triton-stride-of-the-statistic: p_x = x + i_b * H * n + o_h => p_x = x + i_b * n + o_h
triton-first-tile-missing: tl.maximum(first - (n_keys - n_queries), 0) // C.BM * C.BM
  => tl.maximum(first - (n_keys - n_queries), 0) // C.BM * C.BM + C.BM
triton-sigmoid-gradient: return b_p * (1.0 - b_p) * b_dp => return b_p * b_dp
triton-l2-gradient: return b_p * (b_dp - b_p * b_delta) => return b_p * (b_dp - b_delta)
# mixhead_plugin/ops/triton/mixed.py: tests/ops/test_triton.py
triton-mixing-not-transposed-back: m.s_d, m.s_n, m.s_h)  # from => m.s_h, m.s_n, m.s_d)  # from
# mixhead_plugin/ops/penalties.py: tests/ops/test_penalties.py
orthogonal-penalty-without-square: (gram - identity).square().sum( => (gram - identity).abs().sum(
rank-penalty-without-mean-over-pairs: return total / (heads * (heads - 1)) / sentences => return total / sentences
# mixhead_plugin/modules/penalties.py: tests/modules/test_penalties.py tests/criterions/test_orthogonal.py
penalty-gradient-without-sample-size: ctx.regularized.sample_size * ctx.weight => ctx.weight
penalty-with-padding-of-the-other-side: "decoder" if "decoder" in name.split(".") else "encoder" => "encoder"
# mixhead_plugin/criterions/regularized.py: tests/criterions/test_orthogonal.py
penalty-logged-for-one-token: = value * sample_size => = value
# mixhead_plugin/modules/attention.py: tests/modules/test_attention.py tests/models/test_decoding.py
mixing-in-training-only: if self.head_mixing is not None: => if self.head_mixing is not None and self.training:
mixing-hidden-from-hooks: self.num_mixed_heads and not read => self.num_mixed_heads
mixing-missing-in-decoding: mixings = self._mixing(q, query)
  => mixings = self._mixing(q, query) if incremental_state is None else Mixings(None, None)
score-mixing-in-training-only: if self.score_mixing is not None:
  => if self.score_mixing is not None and self.training:
sink-left-out: sink = self.attention_sink() => sink = None
scale-of-another-head-size: self.scaling = self.head_dim**-0.5 => self.scaling = (embed_dim // num_heads) ** -0.5
dropout-in-evaluation: if self.training or self.dropout_module. => if True or self.dropout_module.
# mixhead_plugin/modules/relative_position.py: tests/modules/test_relative_position.py tests/modules/test_attention.py
t5-buckets-grow-too-slowly: math.log(self.farthest / exact) => math.log(self.farthest)
rotary-sign: second * cos + first * sin => second * cos - first * sin
rotary-position-of-a-step: angles[n_keys - q.size(2) :] => angles[: q.size(2)]
gain-mirrored: offsets.clamp(-self.clip, self.clip) + self.clip] => self.clip - offsets.clamp(-self.clip, self.clip)]
# mixhead_plugin/modules/segment_attention.py: tests/modules/test_segment_attention.py
position-term-unscaled: position_bias[:, None].to(q)) * self.scaling, => position_bias[:, None].to(q)),
# mixhead_plugin/modules/transformer_xl.py: tests/models/test_transformer_xl.py
memory-of-the-first-layer: before = memory[i] if memory => before = memory[0] if memory
# mixhead_plugin/modules/cache.py: tests/modules/test_attention.py tests/models/test_decoding.py
cache-not-reordered: rows.index_select(0, order) => rows
cache-forgets-padding: saved["prev_key_padding_mask"] = mask => saved["prev_key_padding_mask"] = None
beams-of-another-sentence: key = key[:, :: self.beam_size] => key = key[:, : key.size(1) // self.beam_size]
# mixhead_plugin/modules/head_mixing.py: tests/modules/test_head_mixing.py tests/models/test_checkpoints.py
upgrade-to-a-mirrored-identity: torch.eye(*self.weight.shape)} => torch.eye(*self.weight.shape).flip(1)}
low-rank-without-root-mean-square: left = left * torch.rsqrt(left.square().mean(-2, keepdim=True) + 1e-6) => pass
differential-adds: -torch.diag_embed(share)], -2) => torch.diag_embed(share)], -2)
# mixhead_plugin/modules/gate.py: tests/modules/test_attention.py
gate-starts-at-a-half: gate = 2 * torch.sigmoid( => gate = torch.sigmoid(
# mixhead_plugin/modules/checkpoint.py: tests/models/test_checkpoints.py
checkpoint-of-other-flags-loads: if option not in wanted or value == wanted[option]: => if True:
# mixhead_plugin/modules/pruning.py: tests/modules/test_pruning.py
pruning-cuts-other-heads: heads[:, None] * attention.head_dim + within => heads[:, None] + attention.num_heads * within
# mixhead_plugin/modules/learning_rate.py: tests/modules/test_learning_rate.py
learning-rate-scale-lost: parameter.optim_overrides[_FACTOR] * (parameter - before) => (parameter - before)
# mixhead_plugin/modules/mems.py: tests/modules/test_mems.py
memory-not-detached: new.detach()[-self.length :] => new[-self.length :]
memory-too-short: old = min(self.length - parts[0].size(0) => old = min(self.length - 1 - parts[0].size(0)
# mixhead_plugin/modules/adaptive.py: tests/modules/test_adaptive.py
adaptive-without-cluster: self.lsm(band(x[rows])) + cluster[rows] => self.lsm(band(x[rows]))
# mixhead_plugin/modules/synthesizer.py: tests/modules/test_synthesizer.py
synthesizer-row-of-a-step: n_keys - query.size(2) : n_keys, :n_keys]) => : query.size(2), :n_keys])
# mixhead_plugin/models/architectures.py: tests/models/test_recipe_architectures.py
recipe-of-another-size: _xl(16, 410, 10, 41, 1000, mem_len=150) => _xl(16, 410, 10, 41, 2100, mem_len=150)
# mixhead_plugin/models/transformer_lm.py: tests/models/test_heads_per_layer.py tests/test_options.py
site-of-the-decoder: return {"decoder-self": shape} => return {"encoder-self": shape}
# mixhead_plugin/options.py: tests/models/test_families.py tests/test_options.py
preset-of-a-family: {"head_mixing": "position-wise"} => {"head_mixing": "position-independent"}
preset-of-l2: "value_init_scale": 0.5 => "value_init_scale": 1.0
preset-of-sigsoftmax: {"attention_normalizer": "sigsoftmax"} => {"attention_normalizer": "softmax"}
scope-not-checked: if not covered: => if False:
learning-rate-not-checked: if not any(PARTS[name][getattr(args, name)].trained => if not any(True
# mixhead_plugin/errors.py: tests/analysis/test_main.py
message-of-many-lines: error: {message}" => error:\n{message}"
# mixhead_plugin/repairs/atomic_checkpoints.py: tests/repairs/test_training.py
checkpoint-written-in-place: part = f"{path}.tmp" => part = path
# mixhead_plugin/repairs/save_dir.py: tests/repairs/test_training.py
users-file-destroyed: tempfile.NamedTemporaryFile(dir=save_dir) => open(os.path.join(save_dir, "dummy"), "wb")
# mixhead_plugin/repairs/restore_file.py: tests/repairs/test_training.py
link-to-nothing-starts-anew: if os.path.lexists(last): => if False:
# mixhead_plugin/repairs/worker_epoch.py: tests/repairs/test_training.py
workers-of-the-first-epoch: epochs.dataloader = None => pass
# mixhead_plugin/repairs/no_worker.py: tests/repairs/test_training.py
every-worker-is-the-first: int(os.environ["RANK"]) => 0
# mixhead_plugin/repairs/binarized_data.py: tests/repairs/test_data_files.py
token-after-the-last-symbol: [:COMPARED].max())) >= symbols: => [:COMPARED].max())) > symbols:
# mixhead_plugin/repairs/safe_globals.py: tests/repairs/test_checkpoint_files.py
code-in-a-checkpoint-runs: torch.serialization.add_safe_globals(CLASSES)
  => __import__("os").environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
# mixhead_plugin/repairs/checkpoint_files.py: tests/repairs/test_checkpoint_files.py
code-in-a-config-runs: and not is_arithmetic(value) => and not value
# mixhead_plugin/repairs/end_of_epoch.py: tests/repairs/test_training.py tests/robustness/test_faults.py
patience-forgotten: {**extra_state, "early_stop": counted} if counted else extra_state => extra_state
bad-epochs-forgotten: num_bad_epochs = state.get("bad", 0) => num_bad_epochs = 0
# mixhead_plugin/repairs/dictionaries.py: tests/repairs/test_data_files.py
empty-dictionary: if len(dictionary) == before: => if False:
# mixhead_plugin/repairs/torchrun_workers.py: tests/repairs/test_training.py
workers-train-apart: if is_alone and is_training and number => if False and number
# mixhead_plugin/analysis/spectrum.py: tests/analysis/test_spectrum.py
spectrum-over-heads: shares = values / values.sum(-1, keepdim=True) => shares = values / values.sum(0, keepdim=True)
# mixhead_plugin/analysis/importance.py: tests/analysis/test_importance.py
importance-with-sign: gradient.double().abs().sum(0) => gradient.double().sum(0)
# mixhead_plugin/analysis/prune.py: tests/analysis/test_prune.py
most-important-heads-pruned: key=lambda head: float( => key=lambda head: -float(
# examples/bert/squad_windows.py: tests/examples/bert/test_squad_windows.py
answer-beside-its-window: torch.tensor(answer) - first + before => torch.tensor(answer) - first + before - 1
last-window-missing: range(0, max(length - room, 0) + stride, stride) => range(0, max(length - room, 0) + 1, stride)
# examples/bert/sentence_pairs.py: tests/examples/bert/test_pretraining_task.py
too-many-words-kept: fate >= self.keep + self.replace] => fate >= self.keep + 2 * self.replace]
next-sentence-label: relation = FOLLOWS if can_follow => relation = RANDOM if can_follow
# examples/common/archives.py: tests/examples/test_archives.py
archive-writes-outside: set_attrs=False, filter="data" => set_attrs=False, filter="fully_trusted"
checksum-ignored: pooch.retrieve(url, archive.sha256, => pooch.retrieve(url, None,
# scripts/fairseq_logs.py: tests/scripts/test_sweep.py
repeated-points-kept: if point["update"] <= int(resumed[1])] => if point["update"]]
# scripts/report.py: tests/scripts/test_report.py
deviation-of-the-population: statistics.stdev(values) => statistics.pstdev(values)
gain-not-paired: ours[seed], theirs[seed]) => ours[seed], statistics.fmean(theirs.values()))
"""


class Fault(NamedTuple):
    name: str
    file: str
    text: str
    substitute: str
    tests: tuple[str, ...]


def faults() -> dict[str, Fault]:
    """Return the faults of TABLE by name."""
    found, file, tests = {}, "", ""
    for line in TABLE.replace("\n  => ", " => ").strip().split("\n"):
        name, _, rest = line.partition(": ")
        if name.startswith("# "):
            file, tests = name.removeprefix("# "), rest
        else:
            text, _, substitute = rest.partition(" => ")
            found[name] = Fault(name, file, text, substitute, tuple(tests.split()))
    return found


def broken(fault: Fault, root: Path) -> str:
    """Return the fault's file with the fault; refuse a text that is not there exactly once."""
    path = root / fault.file
    content = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (number := content.count(fault.text)) != 1 or fault.text == fault.substitute:
        fail(f"{fault.name}: its text must be in {fault.file} exactly once, is there {number} times")
    return content.replace(fault.text, fault.substitute)


def fail(message: str) -> NoReturn:
    print(f"mutants: error: {message}", file=sys.stderr)
    sys.exit(2)


def git(*words: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def worktree() -> Iterator[Path]:
    """Yield a worktree of HEAD that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(tree), "HEAD")
        try:
            if (ROOT / ".venv").exists():
                (tree / ".venv").symlink_to((ROOT / ".venv").resolve())
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def write(path: Path, content: str) -> None:
    """Write a module; Python would take an old .pyc for one of the same size and second."""
    path.write_text(content, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def failing_test(tree: Path, tests: Sequence[str], marks: Sequence[str], limit: float) -> str | None:
    """Return the first test that fails, 'timeout', or None if all pass."""
    own = ROOT / ".venv" / "bin" / "python"
    command = [str(own if own.exists() else sys.executable), "-m", "pytest", "-x", "-q", "-n", "0", *marks]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    process = subprocess.Popen(
        [*command, "-p", "no:cacheprovider", *tests], cwd=tree, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
    )  # fmt: skip
    try:
        output = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        end(process)
    if process.returncode in (0, NO_TESTS):
        return None
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return named[1] if named else f"pytest ended with status {process.returncode}"


def end(process: subprocess.Popen) -> None:
    """End pytest and what its tests have started.

    The launcher of tests/launcher.py is in pytest's group. When pytest ends, it ends its commands, which have groups of
    their own. SIGKILL to the whole group would leave them.
    """
    process.terminate()
    deadline = time.monotonic() + GRACE
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)  # raises once the group is empty
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def noticed(fault: Fault, tree: Path, limit: float) -> dict[str, str]:
    """Return which suite notices the fault, and by which test."""
    path = tree / fault.file
    whole = path.read_text(encoding="utf-8")
    write(path, broken(fault, tree))
    try:
        default = failing_test(tree, fault.tests, DEFAULT, limit)
        slow = None if default else failing_test(tree, fault.tests, SLOW, limit)
    finally:
        write(path, whole)
    # The slow tests have not run without a fault yet.
    if slow and failing_test(tree, fault.tests if slow == "timeout" else [slow], SLOW, limit):
        fail(f"{slow}: fails without a fault, too")
    suite = "default" if default else "all" if slow else "UNNOTICED"
    return {"fault": fault.name, "noticed by": suite, "test": default or slow or ""}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults (default: all)")
    parser.add_argument("--list", action="store_true", help="print the faults")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--limit", type=float, default=900, help="seconds of a run (default: %(default)s)")
    args = parser.parse_args(words)
    table = faults()
    if unknown := sorted(set(args.names) - table.keys()):
        fail(f"{', '.join(unknown)}: no such fault; --list prints them")
    chosen = [table[name] for name in args.names or table]
    for fault in chosen:
        broken(fault, ROOT)
        if args.list:
            print(f"{fault.name}: {fault.file}, {' '.join(fault.tests)}")
    if args.list:
        return 0
    for stop in (signal.SIGINT, signal.SIGTERM):  # as an exception, so that the worktree is removed
        signal.signal(stop, lambda number, _: sys.exit(128 + number))
    results = []
    with worktree() as tree:
        for tests in dict.fromkeys(fault.tests for fault in chosen):
            print(f"without a fault: {' '.join(tests)}", flush=True)
            if test := failing_test(tree, tests, DEFAULT, args.limit):
                fail(f"{test}: fails without a fault")
        for number, fault in enumerate(chosen, 1):
            results.append(noticed(fault, tree, args.limit))
            print(f"[{number}/{len(chosen)}] {' '.join(results[-1].values())}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\n{'fault':45s} {'noticed by':10s} test")
    for row in results:
        print(f"{row['fault']:45s} {row['noticed by']:10s} {row['test']}")
    return int(any(row["noticed by"] == "UNNOTICED" for row in results))


if __name__ == "__main__":
    sys.exit(main())
