#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compare the speed of megatron-core 0.16.1 ("upstream"), our Python and our C in a table.

    python bench.py                 the most important rows, on one screen, in under a minute
    python bench.py --full          all rows, in a few minutes
    python bench.py --billion       time and memory against size, up to a billion documents
    pytest bench.py -k blend        rows of the screen in pytest-benchmark, which can save them

Inputs come from fixed seeds, and are written to a temporary folder (TMPDIR).  In each row, every
competitor runs once without a clock, which warms up files and memory.  Then the results are
compared.  If they differ, the row gets no times.  If they are equal, the competitors take turns,
A B C A B C ..., so a slow moment of the machine affects all of them.  The table shows medians, in
milliseconds.
"""

import argparse
import collections.abc
import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import pathlib
import platform
import shutil
import statistics
import struct
import sys
import tempfile
import time
import tracemalloc
import types
import unittest.mock as mock
import warnings

import numpy as np
import torch
import torch.distributed
import torch.utils.data

SEED = 1234
EOD = 50256
MEAN_LENGTH = 500  # mean number of tokens in a document
# the number of cores that this process may use
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # as torchrun does; on a busy machine threads wait for each other

# -- 1. The competitors ----------------------------------------------------------------------------
# Each competitor is a module with upstream's public names, so a case runs the same lines on all.


@functools.cache
def competitors():
    """Return {name: module} of the competitors that can be imported; the first is the reference."""
    found = {}
    try:
        found["upstream"] = load_upstream()
    except ImportError as error:
        print(f'No column for upstream, so "equal" compares Python and C: {error}')
    found["Python"] = load_ours("Python", "0")
    with contextlib.suppress(ImportError):
        found["C"] = load_ours("C", "1")
    return found


def load_ours(name, value):
    """Import the module beside this file once more, with this value of MEGATRON_MIN_C."""
    path = pathlib.Path(__file__).resolve().parent / "megatron_min.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with mock.patch.dict(os.environ, MEGATRON_MIN_C=value):
        spec.loader.exec_module(module)
    return module


def load_upstream():
    """Collect the data path of megatron-core in one module, and re-create what it lacks."""
    with warnings.catch_warnings(action="ignore"):
        from megatron.core.datasets import blended_megatron_dataset_builder as builder
        from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset, utils

    logging.getLogger("megatron").setLevel(logging.ERROR)
    upstream = types.ModuleType("upstream")
    for part in (utils, helpers, indexed_dataset, gpt_dataset, builder):
        upstream.__dict__.update(part.__dict__)
    upstream.shuffle = shuffle_with_numpy
    upstream.build_pretraining_data_loader = recreated_data_loader
    upstream.preprocess = recreated_preprocess
    return upstream


def shuffle_with_numpy(items, random_state):
    """Shuffle in place with the function that upstream calls."""
    random_state.shuffle(items)


def recreated_data_loader(dataset, consumed_samples, *, micro_batch_size, num_workers):
    """Return torch's loader with persistent workers, as upstream's training script makes it."""
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    return torch.utils.data.DataLoader(dataset, batch_size=micro_batch_size, **workers)


def recreated_preprocess(path, prefix, tokenizer, workers):
    """Tokenize with the package tokenizers on all cores, and write with upstream's builder."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(tokenizer.removeprefix("gigatoken:"))
    builder = competitors()["upstream"].IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    with open(path, "rb") as file:
        texts = [json.loads(line)["text"] for line in file]
    for encoding in encoder.encode_batch_fast(texts):
        builder.add_document(np.array(encoding.ids, np.uint16), [len(encoding.ids)])
    builder.finalize(f"{prefix}.idx")
    return {"text": prefix}


# -- 2. Clock, files, datasets ---------------------------------------------------------------------


class Clock:
    """A stopwatch that runs only inside its with block."""

    seconds = 0.0

    def __enter__(self):
        self.started = time.perf_counter()

    def __exit__(self, kind, error, traceback):
        self.seconds += time.perf_counter() - self.started

    def read(self):
        """Return the seconds so far."""
        return self.seconds


clock = Clock()
FOLDER = tempfile.TemporaryDirectory(prefix="megatron-min-bench-")  # removed when Python exits
HOME = FOLDER.name


@functools.lru_cache(maxsize=2)
def random_documents(n):
    """Return the lengths of n documents, 1 to 999 tokens, and a random order of them (int32)."""
    rng = np.random.default_rng(SEED)
    lengths = rng.integers(1, 2 * MEAN_LENGTH, n, dtype=np.int32)
    return lengths, rng.permutation(n).astype(np.int32)


@functools.cache
def corpus(documents, with_tokens=False):
    """Write a pair of random tokens (uint16), or of a .bin that is a hole; return its prefix."""
    prefix = f"{HOME}/corpus-{documents}-{with_tokens}"
    lengths, _ = random_documents(min(documents, 10**6))
    lengths = np.resize(lengths, documents)  # after a million, the lengths repeat
    pointers = np.cumsum(lengths, dtype=np.int64)
    num_tokens = int(pointers[-1])
    pointers -= lengths
    pointers *= 2  # from tokens to bytes
    with open(f"{prefix}.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        lengths.tofile(file)
        pointers.tofile(file)
        del pointers  # with a billion documents, this frees 8 GB
        np.arange(documents + 1).tofile(file)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * num_tokens)
        if with_tokens:
            tokens = np.random.default_rng(SEED).integers(0, EOD, num_tokens, dtype=np.uint16)
            tokens[np.cumsum(lengths) - 1] = EOD
            tokens.tofile(file)
    return prefix


# The attributes of a tokenizer that a dataset uses.
TOKENIZER = types.SimpleNamespace(vocab_size=EOD + 1, eod=EOD, unique_identifiers={"name": "bench"})
FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")


def build_splits(mm, sizes, S=2048, **options):
    """Build [train, valid, test]."""
    options = dict.fromkeys(FLAGS, False) | options
    config = mm.GPTDatasetConfig(SEED, S, tokenizer=TOKENIZER, **options)
    return mm.BlendedMegatronDatasetBuilder(mm.GPTDataset, sizes, lambda: True, config).build()


def build_dataset(mm, prefix, num_samples=None, **options):
    """Build the training dataset of a complete corpus; the folder PREFIX holds its cache."""
    data = {"blend": ([prefix], None), "split": "1"}
    return build_splits(mm, [num_samples, None, None], **data, **options)[0]


def samples_in(documents, epochs):
    """Return how many samples of 2,048 tokens the epochs have, without a tenth of the last one."""
    return int((epochs - 0.1) * documents * MEAN_LENGTH / 2048)


@functools.lru_cache(maxsize=3)
def dataset_to_read(mm, S, **options):
    """Build a dataset of 100,000 documents; the competitors share its cache."""
    return build_dataset(mm, corpus(100_000, with_tokens=True), S=S, **options)


# -- 3. The cases ----------------------------------------------------------------------------------
# A case is a function that takes a competitor, a number of items, and options.  Section 4 has a
# line for each case.
#
#     def case(mm, n, S):
#         ...              not timed: inputs, an empty folder, an open file
#         with clock:
#             ...          timed
#         return ...       the result that must be equal: arrays, tensors or bytes, also nested in
#                          lists and dicts, or an iterator, which is consumed when it is compared


def samples(mm, n, S):
    """Read dataset[i] in order, at random positions of the file."""
    dataset = dataset_to_read(mm, S)
    with clock:
        for i in range(n):
            dataset[i]
    return (dataset[i] for i in range(n))


def read_batches(mm, n, num_workers, **options):
    """Yield batches of 8 samples: the first batch, and then n samples."""
    dataset = dataset_to_read(mm, 2048, **options)
    sizes = {"micro_batch_size": 8, "num_workers": num_workers}
    batches = mm.build_pretraining_data_loader(dataset, 0, **sizes)
    yield from itertools.islice(batches, 1 + n // 8)


def loader(mm, n, num_workers=0, **options):
    """Read batches of 8 samples; the first one is not timed, because it waits for the workers."""
    batches = read_batches(mm, n, num_workers, **options)
    next(batches)
    with clock:
        for _ in range(n // 8):
            next(batches)
    return read_batches(mm, n, num_workers, **options)


def sample_index(mm, n):
    """Call build_sample_idx for one epoch of documents in random order, S=2048."""
    lengths, order = random_documents(n)
    num_tokens = int(lengths.sum(dtype=np.int64))
    with clock:
        rows = mm.build_sample_idx(lengths, order, 2048, 1, num_tokens)
    return rows


def shuffle(mm, n):
    """Shuffle an int32 array."""
    items = np.arange(n, dtype=np.int32)
    random_state = np.random.RandomState(SEED)
    with clock:
        mm.shuffle(items, random_state)
    return [items, random_state.get_state()]


def blend(mm, n, datasets):
    """Call build_blending_indices with random weights."""
    weights = np.random.default_rng(SEED).random(datasets)
    weights /= weights.sum()
    which = np.zeros(n, np.int16)
    sample = np.zeros(n, np.int64)
    with clock:
        mm.build_blending_indices(which, sample, weights, datasets, n, False)
    return [which, sample]


def build(mm, n, epochs=1):
    """Build one corpus without a cache, and write the cache."""
    prefix = corpus(n)
    shutil.rmtree(prefix, ignore_errors=True)
    with clock:
        build_dataset(mm, prefix, samples_in(n, epochs))
    paths = pathlib.Path(prefix).rglob("*.*")
    return {str(p): p.read_bytes() for p in paths if not p.name.endswith("-manifest.json")}


def build_blend(mm, n, documents, is_new):
    """Build a blend of n corpora in three splits, without a cache or from one."""
    cache = f"{HOME}/blend-{n}-{documents}"
    if is_new:
        # This folder is new each time.  After thousands of files were deleted, ext4 takes up to
        # 0.3 ms to create a file, because it does not reuse their inodes for some seconds.
        cache = tempfile.mkdtemp(dir=HOME)
    prefixes = [corpus(documents + k) for k in range(n)]
    weights = np.random.default_rng(SEED).integers(1, 100, n).tolist()
    num_samples = samples_in(n * documents, 1)
    sizes = [num_samples, num_samples // 100, num_samples // 100]
    options = {"blend": (prefixes, weights), "split": "98,1,1", "path_to_cache": cache}
    # Upstream caches a blend only in a process group, so this process makes a group of one.
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    with clock:
        splits = build_splits(mm, sizes, **options)
    torch.distributed.destroy_process_group()
    found = []
    for split in splits:
        found += [split.dataset_index[:], split.dataset_sample_index[:]]
        found += [split.datasets[0].document_index[:], split.datasets[-1].shuffle_index[:]]
    return found


def add_documents(mm, n):
    """Add int32 arrays to a pair of uint16, one document at a time.  Nothing of it is in C."""
    documents = [np.arange(length, dtype=np.int32) for length in random_documents(1000)[0]]
    paths = [f"{HOME}/pair.bin", f"{HOME}/pair.idx"]
    builder = mm.IndexedDatasetBuilder(paths[0], dtype=np.uint16)
    with clock:
        for i in range(n):
            tokens = documents[i % 1000]
            builder.add_document(tokens, [len(tokens)])
    builder.finalize(paths[1])
    return [pathlib.Path(path).read_bytes() for path in paths]


@functools.cache
def text_and_tokenizer(n):
    """Write n pages of Python's library as JSON lines, and a BPE for them; return the paths."""
    import tokenizers

    modules = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    code = "".join(path.read_text("utf-8", "replace") for path in modules)
    pages = [code[2000 * k : 2000 * (k + 1)] for k in range(len(code) // 2000)]
    text_path = f"{HOME}/text.jsonl"
    with open(text_path, "w") as file:
        for k in range(n):
            file.write(json.dumps({"text": pages[k % len(pages)]}) + "\n")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(pages, 16_000, special_tokens=special, show_progress=False)
    tokenizer_path = f"{HOME}/tokenizer.json"
    tokenizer.save(tokenizer_path)
    return text_path, tokenizer_path


def preprocess(mm, n, engine="", workers=1):
    """Call preprocess with the package that engine names, and return both files of the pair."""
    text_path, tokenizer_path = text_and_tokenizer(n)
    # so tokenizers uses all cores, and does not warn when our workers are forked
    with mock.patch.dict(os.environ, TOKENIZERS_PARALLELISM="true"), clock:
        made = mm.preprocess(text_path, f"{HOME}/text", engine + tokenizer_path, workers=workers)
    return [pathlib.Path(f"{made['text']}.{kind}").read_bytes() for kind in ("bin", "idx")]


# -- 4. The rows -----------------------------------------------------------------------------------


class Case:
    """A row of the table: a function of section 3, the number of items, and options.

    The title ends in "*" if upstream's package lacks the part, so that it is re-created here.
    """

    def __init__(self, title, function, n, unit, **options):
        self.title = title
        self.size = f"{n:,} {unit}"
        self.function = function
        self.arguments = {"n": n, **options}

    def run(self, name):
        """Run a competitor, and return the seconds and its result."""
        before = clock.read()
        result = self.function(competitors()[name], **self.arguments)
        return clock.read() - before, result


def is_same(*results):
    """Return whether all values, dtypes and shapes are equal, also nested ones."""
    first, *others = results
    if any((first is None) != (other is None) for other in others):  # different lengths
        return False
    if isinstance(first, dict):
        return is_same(*[sorted(result.items()) for result in results])
    if isinstance(first, (list, tuple, collections.abc.Iterator)):
        return all(is_same(*items) for items in itertools.zip_longest(*results))
    if isinstance(first, (np.ndarray, torch.Tensor)):
        return all(first.dtype == b.dtype and np.array_equal(first, b) for b in others)
    return all(first == other for other in others)


RESETS = {"reset_position_ids": True, "eod_mask_loss": True}
DENSE = {"reset_attention_mask": True, "create_attention_mask": True, **RESETS}

SCREEN = [  # the most important rows
    Case("dataset[i], S=2048", samples, 4000, "samples", S=2048),
    Case("loader, S=2048 *", loader, 4000, "samples"),
    Case("loader, num_workers=2 *", loader, 2000, "samples", num_workers=2),
    Case("loader, resets *", loader, 2000, "samples", **RESETS),
    Case("sample index, S=2048", sample_index, 3 * 10**6, "documents"),
    Case("shuffle", shuffle, 3 * 10**6, "int32"),
    Case("blend, 64 datasets", blend, 100_000, "samples", datasets=64),
    Case("blend, 1,024 datasets", blend, 100_000, "samples", datasets=1024),
    Case("build, new cache, S=2048", build, 3 * 10**6, "documents"),
    Case("blend, cache hit", build_blend, 200, "small corpora", documents=5000, is_new=False),
    Case("add_document, arrays", add_documents, 20_000, "documents"),
]

MORE = [  # with --full
    Case("dataset[i], S=512", samples, 4000, "samples", S=512),
    Case("dataset[i], S=8192", samples, 1000, "samples", S=8192),
    Case("loader, resets, dense mask *", loader, 32, "samples", **DENSE),
    Case("build, 4 epochs", build, 10**6, "documents", epochs=4),
    Case("blend, new cache", build_blend, 200, "small corpora", documents=5000, is_new=True),
    Case("blend, new cache", build_blend, 20, "large corpora", documents=200_000, is_new=True),
    Case("blend, cache hit", build_blend, 20, "large corpora", documents=200_000, is_new=False),
    Case("text to pair, tokenizers *", preprocess, 4000, "pages of 2 kB", workers=CORES),
    Case("text to pair, gigatoken *", preprocess, 4000, "pages of 2 kB", engine="gigatoken:"),
]

# -- 5. Measuring and printing ---------------------------------------------------------------------


def measure(case, rounds):
    """Return the cells of a row, timed for at least this many rounds and one second.

    With rounds 0, the competitors are compared, but not timed.
    """
    times = {name: [] for name in competitors()}
    cells = [case.title, case.size]
    try:
        results = [case.run(name)[1] for name in times]
    except ImportError as error:  # tokenizers or gigatoken is not installed
        return [*cells, str(error)]
    if len(results) == 1:
        cells.append("alone")
    elif is_same(*results):
        cells.append("yes")
    else:
        return [*cells, "NO"]
    if rounds == 0:
        return cells
    end = time.perf_counter() + 1
    while len(times["Python"]) < rounds or time.perf_counter() < end:
        for name in times:
            seconds, _ = case.run(name)
            times[name].append(1e3 * seconds)
    medians = [statistics.median(times[name]) for name in times]
    cells += [f"{median:,.1f}" for median in medians]
    cells += [f"{medians[0] / median:.2f}x" for median in medians[1:]]
    return cells


def print_row(cells):
    """Print a line of a Markdown table: title, size, equality, and then numbers."""
    line = f"| {cells[0]:28} | {cells[1]:19} | {cells[2]:5} |"
    for cell in cells[3:]:
        line += f" {cell:>8} |"
    print(line, flush=True)


def machine():
    """Describe the machine and the versions that the numbers depend on."""
    versions = [f"Python {platform.python_version()}"]
    for package in ("numpy", "torch", "megatron-core", "tokenizers", "gigatoken"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    ours = f"megatron-min {competitors()['Python'].__version__}"
    return f"{platform.machine()}, {CORES} cores, {ours}\n{', '.join(versions)}\n"


def main():
    """Print the requested table, and return 0, or 1 if a result differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="all rows, in a few minutes")
    text = "time at least this many runs (%(default)s); 0: compare the results, without times"
    parser.add_argument("--rounds", type=int, default=3, help=text)
    parser.add_argument("--billion", action="store_true", help="time and memory against size")
    options = parser.parse_args()
    print(machine())
    if options.billion:
        print_sizes()
        return 0
    cases = SCREEN + MORE if options.full else SCREEN
    first, *others = competitors()
    print_row(["case", "size", "equal", first, *others, *[f"{name} x" for name in others]])
    print(f"|---|---|---|{'--:|' * (2 * len(others) + 1)}")
    equal = []
    for case in cases:
        cells = measure(case, options.rounds)
        print_row(cells)
        equal.append(cells[2])
    print(f"\nTimes are in milliseconds; x: times faster than {first}")
    print("*: upstream's package lacks it, so bench.py re-creates it (text to pair: on all cores)")
    return int("NO" in equal)


# -- 6. A billion documents ------------------------------------------------------------------------
# Only our side is measured: upstream holds several int64 for each document, and runs out of memory.
# Sizes that would need more memory than the machine has are left out.


def print_sizes():
    """Print a line for each number of documents and each number of epochs."""
    mm = list(competitors().values())[-1]
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # bytes of memory
    print("| million documents | epochs | build s | hit s | peak GiB |")
    print(f"|{'--:|' * 5}")
    for documents, epochs in itertools.product((10**6, 10**7, 10**8, 10**9), (1, 3, 10)):
        if 8 * documents * (epochs + 1) > 0.9 * physical:
            continue
        prefix = corpus(documents)
        shutil.rmtree(prefix, ignore_errors=True)
        num_samples = samples_in(documents, epochs)
        started = time.perf_counter()
        build_dataset(mm, prefix, num_samples)
        built = time.perf_counter()
        build_dataset(mm, prefix, num_samples)
        found = time.perf_counter()
        shutil.rmtree(prefix)
        tracemalloc.start()  # it slows the build down, so memory is measured in a separate run
        build_dataset(mm, prefix, num_samples)
        _, peak = tracemalloc.get_traced_memory()  # pages of mapped files do not count
        tracemalloc.stop()
        line = f"| {documents // 10**6:17,} | {epochs:6} | {built - started:7.2f} |"
        print(f"{line} {found - built:5.3f} | {peak / 2**30:8.2f} |", flush=True)


# -- 7. The screen in pytest-benchmark -------------------------------------------------------------


def pytest_generate_tests(metafunc):
    """Make one test for each row of the screen and each competitor."""
    import pytest

    tests = []
    for case, name in itertools.product(SCREEN, competitors()):
        group = f"{case.title}, {case.size}"
        mark = pytest.mark.benchmark(group=group, timer=clock.read)
        tests.append(pytest.param(case, name, id=f"{case.title}, {name}", marks=mark))
    metafunc.parametrize("case, name", tests)


def test_case(case, name, benchmark):
    """Compare the result with the first competitor, then time it by the clock of the cases."""
    _, expected = case.run(next(iter(competitors())))
    _, result = case.run(name)
    assert is_same(expected, result)
    benchmark.pedantic(case.run, args=(name,), rounds=3)


if __name__ == "__main__":
    sys.exit(main())
