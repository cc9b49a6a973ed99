"""The command: `python -m fuzz --num 1000`, with `tests` and `src` on the path; `make fuzz N=1000` does the same.

Every failure is shrunk and printed with a command that runs it again. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import json
import multiprocessing
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch

import lowtide
from fuzz.engines import Facts, compiled_engines, fit_engines, random_engines
from fuzz.judge import Verdict, generic, judge, reference_of
from fuzz.programs import Spec, random_spec
from fuzz.shrink import shrink

ENGINES = ("apply", "one", "fit", "compiled")  # "one": one of those of "apply", for many programs in little time
_CHUNK = 5  # programs that one task of a process runs


def run_seed(seed: int, engines: tuple[str, ...], without: frozenset[str] = frozenset()) -> list[Verdict]:
    """The program of a seed under all its engines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch has to say about such programs
        return _run_seed(seed, engines, without)


def _run_seed(seed: int, engines: tuple[str, ...], without: frozenset[str]) -> list[Verdict]:
    spec = random_spec(seed, without)
    if "fit" in engines:  # with room between floor and plain peak, and steps as `fit` saw them
        spec = replace(spec, batch=8 * spec.batch, loop=spec.loop if seed % 3 == 0 else "plain")
    facts = Facts(spec)
    first = reference_of(spec)
    if isinstance(first, str):
        return [Verdict(spec, "skipped", "plain", first)]
    try:
        chosen = random_engines(spec, facts) if {"apply", "one"} & set(engines) else []
    except Exception as error:
        # The plain run leaves out own checkpoints, and of other loops no forward and backward alone was seen to work.
        is_other = "checkpoint" in spec.names or spec.loop != "plain"
        is_refused = isinstance(error, lowtide.LowtideError) or is_other
        return [
            Verdict(spec, "refused" if is_refused else "failed", f"trace: {type(error).__name__}", str(error)[:300])
        ]
    if "one" in engines and chosen:
        chosen = [chosen[seed % len(chosen)]]
    chosen += fit_engines() if "fit" in engines else []
    chosen += compiled_engines() if "compiled" in engines else []
    return [judge(replace(spec, engine=engine), facts) for engine in chosen]


def run_seeds(seeds: list[int], engines: tuple[str, ...], without: frozenset[str]) -> list[Verdict]:
    """What one task of a process does."""
    return [verdict for seed in seeds for verdict in run_seed(seed, engines, without)]


def reproducer(spec: Spec) -> str:
    """The command that runs one program."""
    quoted = json.dumps(spec.to_json()).replace("'", "'\\''")
    return f"PYTHONPATH=src:tests python -m fuzz --spec '{quoted}'"


def _all_verdicts(options: argparse.Namespace, without: frozenset[str]) -> Iterator[Verdict]:
    seeds = list(range(options.seed, options.seed + options.num))
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    if options.jobs == 1:
        for chunk in chunks:
            yield from run_seeds(chunk, options.engines, without)
        return
    context = multiprocessing.get_context("spawn")
    while chunks:
        with concurrent.futures.ProcessPoolExecutor(options.jobs, context, initializer=_one_thread) as pool:
            tasks = [pool.submit(run_seeds, chunk, options.engines, without) for chunk in chunks]
            done = []
            try:
                for chunk, task in zip(chunks, tasks, strict=True):
                    yield from task.result()
                    done.append(chunk)
            except concurrent.futures.process.BrokenProcessPool:
                pass
        chunks = [chunk for chunk in chunks if chunk not in done]
        if chunks:  # the process died in one of the first few: find out in which program
            for seed in chunks.pop(0):
                yield from _run_apart(seed, options, without)


def _run_apart(seed: int, options: argparse.Namespace, without: frozenset[str]) -> list[Verdict]:
    """A program in a process of its own, after a pool of them died."""
    command = [sys.executable, "-m", "fuzz", "--num", "1", "--seed", str(seed), "--jobs", "1"]
    command += ["--engines", ",".join(options.engines), "--without", ",".join(without)]
    if subprocess.run(command, check=False, capture_output=True).returncode < 0:
        spec = random_spec(seed, without)
        return [Verdict(spec, "failed", "crash: the process died", " ".join(command[1:]))]
    return run_seeds([seed], options.engines, without)


def _one_thread() -> None:
    torch.set_num_threads(1)


class Failures:
    """Failures shrunk and printed: of one program and kind once, and only if they shrink to something new."""

    def __init__(self, shrinks: bool, per_kind: int) -> None:
        self._shrinks, self._per_kind = shrinks, per_kind
        self._seen: set[tuple[int, str]] = set()
        self._printed: dict[str, list[str]] = {}

    def add(self, failed: Verdict) -> None:
        """Shrink and print a failure that was not seen before."""
        key, printed = (failed.spec.seed, failed.kind), self._printed.setdefault(failed.kind, [])
        if key in self._seen or len(printed) >= self._per_kind:
            return
        self._seen.add(key)
        smallest = shrink(failed) if self._shrinks and "died" not in failed.kind else failed
        signature = json.dumps([smallest.spec.net, smallest.spec.loop, smallest.spec.engine.get("kind")])
        if signature not in printed:
            printed.append(signature)
            print(f"FAILED {smallest.kind}: {smallest.text} (seed {failed.spec.seed})")
            print(f"  {reproducer(smallest.spec)}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num", type=int, default=100, help="how many programs; each runs under several engines")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first program")
    parser.add_argument("--jobs", "-j", type=int, default=1, choices=(1, 2), help="processes")
    parser.add_argument("--engines", default="apply", type=lambda text: tuple(text.split(",")), help=", ".join(ENGINES))
    parser.add_argument("--without", default="", help="names of blocks to leave out, separated by commas")
    parser.add_argument("--per-kind", type=int, default=5, help="different failures of one kind to print")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--spec", help="run this one program only")
    options = parser.parse_args(arguments)
    _one_thread()
    if options.spec:
        verdict = judge(Spec(**json.loads(options.spec)))
        print(verdict.outcome, verdict.kind, verdict.text)
        return int(verdict.outcome == "failed")
    if set(options.engines) - set(ENGINES):
        parser.error(f"engines are {', '.join(ENGINES)}")
    started, counts = time.perf_counter(), collections.Counter[tuple[str, str, str]]()
    failures = Failures(not options.no_shrink, options.per_kind)
    with contextlib.suppress(KeyboardInterrupt):  # the table of what ran so far is printed all the same
        for verdict in _all_verdicts(options, frozenset(filter(None, options.without.split(",")))):
            is_failure = verdict.outcome == "failed"
            row = (verdict.outcome, verdict.kind, "" if is_failure else generic(verdict.text))
            counts[row] += 1
            if is_failure:
                failures.add(verdict)
    seconds, total = time.perf_counter() - started, sum(counts.values())
    for (outcome, kind, text), number in sorted(counts.items(), key=lambda item: (item[0][0], -item[1])):
        print(f"{number:7} {outcome:8} {kind}{': ' if text else ''}{text}")
    print(f"{total} runs of {options.num} programs in {seconds:.0f} s, {total / seconds:.1f} per second")
    return int(any(outcome == "failed" for outcome, _, _ in counts))
