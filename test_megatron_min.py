# SPDX-License-Identifier: MIT
"""Tests of megatron_min: one suite, run on the Python kernels and on the C kernels.

    pytest                              C too if _megatron_min is built, upstream too if installed
    MEGATRON_MIN_C=1 pytest             a missing build is a failure; =0: the Python kernels alone
    MEGATRON_MIN_CASES=20 pytest        twenty times the random cases, and the damaged files
    MEGATRON_MIN_PARITY=1 pytest        a missing megatron-core is a failure, not a skip
    MEGATRON_MIN_FORK=0 pytest          tests that fork this process are skipped

Oracles are plain loops, numpy's own shuffle, and megatron-core 0.16.1 (extra "parity").  Helpers
take `mm` or `up` (ours or upstream's names in one namespace), so a parity test runs one function
twice.  "Upstream: ..." in a test says what megatron-core does instead.
"""

import ast
import bz2
import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import datetime
import doctest
import errno
import functools
import gc
import glob
import gzip
import hashlib
import http.server
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import logging
import lzma
import math
import multiprocessing
import os
import pathlib
import pickle
import re
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import tracemalloc
import types
import unittest.mock as mock
import warnings
import weakref
import zipfile
import zlib

import fsspec
import numpy as np
import pytest
import torch

HERE = pathlib.Path(__file__).resolve().parent
CASES = float(os.environ.get("MEGATRON_MIN_CASES", 1))
IMPLEMENTATIONS = ["python"] if os.environ.get("MEGATRON_MIN_C") == "0" else ["python", "c"]
FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else None
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and limits that hold")

torch.set_num_threads(1)
os.environ.pop("PYTHONWARNINGS", None)  # the processes of the tests warn as Python does by itself


@pytest.fixture(autouse=True)
def usual_warnings(request):
    """And so do the tests, but for those that have filters of their own."""
    with warnings.catch_warnings():
        if request.node.get_closest_marker("filterwarnings") is None:
            warnings.simplefilter("default")
            warnings.simplefilter("ignore", ResourceWarning)
        yield


@functools.cache
def copy_of_module(implementation):
    """A private copy of the module with these kernels; skips the test if they are not built."""
    name = f"megatron_min_{implementation}"
    spec = importlib.util.spec_from_file_location(name, HERE / "megatron_min.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_MIN_C", "1" if implementation == "c" else "0")
        patch.syspath_prepend(str(HERE))
        try:
            spec.loader.exec_module(module)
        except ImportError:
            if implementation == "python" or os.environ.get("MEGATRON_MIN_C") == "1":
                raise
            pytest.skip("_megatron_min is not built")
    return module


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts into the background so, and the commands under test would be, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_fsync():
    """Waiting for the disk would be most of the run time; one test looks at the calls."""
    gc.freeze()  # upstream calls gc.collect() for every file; pytest's own objects need no look
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", do_not_wait)
        yield


def do_not_wait(descriptor):
    """In place of os.fsync()."""


@pytest.fixture(scope="session", autouse=True)
def forks():
    """With MEGATRON_MIN_FORK=0 a test that forks this process is skipped.

    The allocator of gcc 12's address sanitizer, unlike glibc's, does not see to its locks at a
    fork: where another thread holds one at that moment, the new process waits for it for ever.
    """
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("MEGATRON_MIN_FORK") == "0":
            patch.setattr(multiprocessing.context.ForkProcess, "_Popen", staticmethod(do_not_fork))
        yield


def do_not_fork(process):
    """In place of what starts a forked process."""
    pytest.skip("forks")


@pytest.fixture(params=IMPLEMENTATIONS)
def mm(request):
    """The module, once with each implementation of the kernels."""
    return copy_of_module(request.param)


@pytest.fixture(scope="session")
def one():
    """The module, once: for tests that run no kernel."""
    return copy_of_module("python")


@pytest.fixture(scope="session")
def up():
    """megatron-core's names in one namespace, so that helpers work on it as on our module.

    If it is not installed the test is skipped; with MEGATRON_MIN_PARITY=1 that fails.  One that is
    installed and cannot be imported is a failure in any case.
    """
    try:
        importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        if os.environ.get("MEGATRON_MIN_PARITY") == "1":
            raise
        pytest.skip("megatron-core is not installed: pip install 'megatron-min[parity]'")
    modules = ["blended_dataset", "blended_megatron_dataset_builder"]
    modules += ["blended_megatron_dataset_config", "gpt_dataset", "helpers", "indexed_dataset"]
    modules += ["megatron_tokenizer", "utils"]
    names = types.SimpleNamespace()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            found = importlib.import_module(f"megatron.core.datasets.{module}")
            vars(names).update({k: v for k, v in vars(found).items() if not k.startswith("__")})
        names.calculator = importlib.import_module("megatron.core.num_microbatches_calculator")
        names.rerun = importlib.import_module("megatron.core.rerun_state_machine")
    gc.freeze()  # see no_fsync
    return names


@pytest.fixture
def group():
    """A group of one process: upstream cannot cache a blend without one."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


# ==============================================================================
# Helpers
# ==============================================================================


class Tok:
    """A tokenizer of numbers; pad, eos, special_tokens_dict, ... as given."""

    def __init__(self, eod=0, vocab_size=1000, **attributes):
        self.eod, self.vocab_size = eod, vocab_size
        self.unique_identifiers = collections.OrderedDict({"class": "Tok", "eod": eod})
        vars(self).update(attributes)

    def tokenize(self, text):
        return [int(number) for number in text.split()]

    def detokenize(self, ids):
        return " ".join(map(str, ids))


class Bare:
    """A dataset that is no MegatronDataset, with a path and a split."""

    dataset_path = "bare"

    def __init__(self, n, split=None):
        self.n = n
        self.index_split = split
        self.unique_identifiers = {"class": "Bare", "n": n}

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"sample": i}


def cases(count):
    """A random generator for each of so many cases (times MEGATRON_MIN_CASES)."""
    for case in range(max(1, round(count * CASES))):
        yield np.random.default_rng([case, count])


def same(found, wanted, note=""):
    """Equal in dtype, shape and every value."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype, note
    if found.shape == wanted.shape and (found == wanted).all():
        return  # what follows takes ten times as long, and says what differs
    np.testing.assert_array_equal(found, wanted, err_msg=str(note), strict=True)


def same_samples(found, wanted, note=""):
    """Two samples hold equal tensors under equal keys, in the same order."""
    assert list(found) == list(wanted), note
    for key in wanted:
        same(found[key], wanted[key], (note, key))


def mk(mm, prefix, docs, dtype=np.int32):
    """Write a pair with one sequence a document -> its prefix."""
    prefix = str(prefix)
    os.makedirs(os.path.dirname(prefix), exist_ok=True)
    builder = mm.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for doc in docs:
        builder.add_document(np.asarray(doc, dtype), [len(doc)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def random_docs(rng, most=30, longest=20, empty=0.1, vocab=50):
    """Documents of 0 .. longest tokens, at least one token in all."""
    lengths = rng.integers(1, longest + 1, rng.integers(1, most + 1))
    if rng.random() <= empty:
        lengths[:] = 0
    lengths[rng.integers(len(lengths))] += 1
    lengths[rng.random(len(lengths)) <= empty] = 0
    return [rng.integers(0, vocab, n) for n in lengths] + [[1]]


def config(mm, blend=None, **fields):
    """A GPTDatasetConfig with short samples, no mask, and the whole of a corpus for training."""
    defaults = {
        "random_seed": 1234,
        "sequence_length": 8,
        "tokenizer": Tok(),
        "create_attention_mask": False,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
    }
    if blend is not None:
        defaults |= {"blend": blend, "split": "1,0,0"}
    return mm.GPTDatasetConfig(**defaults | fields)


def gpt(mm, prefix, n=None, split="train", documents=None, **fields):
    """A GPTDataset of n samples over all (or the given) documents of a prefix."""
    ds = mm.IndexedDataset(prefix)
    documents = np.arange(len(ds), dtype=np.int32) if documents is None else documents
    cfg = config(mm, ([prefix], None), **fields)
    return mm.GPTDataset(ds, prefix, documents, n, mm.Split[split], cfg)


def build(mm, sizes, cfg, cls=None):
    """[train, valid, test] of a class of datasets, by default GPTDataset."""
    cls = cls or mm.GPTDataset
    return mm.BlendedMegatronDatasetBuilder(cls, sizes, yes, cfg).build()


def yes():
    """Whether the datasets are built on this rank."""
    return True


def lists(arrays):
    """Arrays -> lists, to compare their values alone."""
    return [values.tolist() for values in arrays]


def stream(ds):
    """All tokens of a GPTDataset, in the order of its document_index."""
    documents = [ds.dataset.get(int(i)) for i in ds.document_index]
    return np.concatenate([[], *documents]).astype(np.int64)


def files_of(folder):
    """{name: bytes} of a folder and those below it."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in pathlib.Path(folder).rglob("*")
        if p.is_file()
    }


def bytes_of_pair(prefix):
    """The contents of .bin and .idx."""
    return [pathlib.Path(f"{prefix}.{kind}").read_bytes() for kind in ("bin", "idx")]


def patch(path, offset, data):
    """Overwrite some bytes of a file; an offset < 0 counts from its end."""
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        file.write(data)


def quiet(function, *args, **kwargs):
    """Call, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def python(code, *args, timeout=100, env=None, **kwargs):
    """Run code in a new interpreter that finds megatron_min; env: variables to add."""
    path = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    variables = {**os.environ, "PYTHONPATH": path, **(env or {})}
    return subprocess.run(
        [sys.executable, "-c", code, *[str(argument) for argument in args]],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=variables,
        **kwargs,
    )


def command(mm, capsys, *argv):
    """Run a command in this process -> (exit code, stdout, stderr)."""
    capsys.readouterr()
    try:
        code = mm.main([str(argument) for argument in argv])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def preprocess_command(mm, capsys, path, out, *more):
    """preprocess from one file to one prefix, in this process."""
    return command(mm, capsys, "preprocess", "--input", path, "--output-prefix", out, *more)


def one_sentence(err):
    """Is this what a wrong argument or file may print on stderr?

    One line of several words that begins with the name of the program; in front of it warnings,
    and argparse's lines on usage.  Nothing at all is no sentence, and a traceback is none.
    """
    *others, sentence = err.strip().split("\n")
    for line in others:
        if not line.startswith(("warning: ", "usage: ", " ")):
            return False
    return sentence.startswith("megatron-min") and len(sentence.split()) > 3


def in_children(*jobs, timeout=600):
    """Run functions, each in a process of its own, all at once -> their exit codes.

    A code is 0 if the function returned, None if it hangs, negative for the signal that ended it.
    """
    processes = [FORK.Process(target=job) for job in jobs]
    for process in processes:
        quiet(process.start)
    for process in processes:
        process.join(timeout)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def jsonl(path, texts, key="text"):
    """Write texts as JSON lines -> the path."""
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({key: text}) + "\n" for text in texts)
    return str(path)


@pytest.fixture
def toy(mm, tmp_path):
    """The corpus of every example: aaaa bbb cccccc."""
    return mk(mm, tmp_path / "toy", [[97] * 4, [98] * 3, [99] * 6])


# ==============================================================================
# The toy corpus by hand, and the module itself
# ==============================================================================


def test_the_toy_example_by_hand(mm, tmp_path):
    """The path of a token, from the pair to the batches: aaaa bbb cccccc, S = 4."""
    prefix = mm.toy_corpus(tmp_path)

    # the pair: 13 tokens of one byte; three sequences, each of them a document
    assert pathlib.Path(f"{prefix}.bin").read_bytes() == b"aaaabbbcccccc"
    corpus = mm.IndexedDataset(prefix)
    same(corpus.sequence_lengths, np.array([4, 3, 6], np.int32))
    same(corpus.sequence_pointers, np.array([0, 4, 7], np.int64))
    same(corpus.document_indices, np.array([0, 1, 2, 3], np.int64))

    # the orders: three samples of 4 + 1 tokens; each starts at the last token of the one before
    #   stream     a a a a b b b c c c c c c
    #   sample 0   0 . . . 4
    #   sample 1           4 . . . 8
    #   sample 2                   8 . . . 12
    ds = gpt(mm, prefix, 3, sequence_length=4)
    same(ds.document_index, np.array([0, 1, 2], np.int32))
    same(ds.sample_index, np.array([[0, 0], [1, 0], [2, 1], [2, 5]], np.int32))
    same(ds.shuffle_index, np.array([1, 2, 0], np.uint32))

    # the samples, in the shuffled order 1, 2, 0
    pieces = [[(1, 0, 3), (2, 0, 2)], [(2, 1, 5)], [(0, 0, 4), (1, 0, 1)]]
    assert [ds.pieces(k) for k in range(3)] == pieces
    text = {"tokens": [b"bbbc", b"cccc", b"aaaa"], "labels": [b"bbcc", b"cccc", b"aaab"]}
    for k in range(3):
        wanted = {key: torch.tensor(list(rows[k])) for key, rows in text.items()}
        wanted |= {"loss_mask": torch.ones(4), "position_ids": torch.arange(4)}
        same_samples(ds[k], wanted, k)

    # the batches of two ranks: rank 0 gets samples 0 and 2; rank 1 sample 1 and padding, no loss
    for rank, rows in ((0, [b"bbbc", b"aaaa"]), (1, [b"cccc", b"bbbc"])):
        fields = {"micro_batch_size": 1, "data_parallel_rank": rank, "data_parallel_size": 2}
        batches = list(mm.build_pretraining_data_loader(ds, 0, **fields, drop_last=False))
        assert [bytes(batch["tokens"][0].tolist()) for batch in batches] == rows
        assert [batch["loss_mask"].sum().item() for batch in batches] == [4, 4 - 4 * rank]


@pytest.fixture(scope="session")
def source():
    """The text of the module."""
    return (HERE / "megatron_min.py").read_text(encoding="utf-8")


def test_contents_match_banners(source, one):
    """The docstring lists the parts and the sections; each section opens with its question."""
    promised = re.findall(r"^ *(Part I+, .+|\d+\. .+?)(?:  +.+)?$", one.__doc__, re.M)
    banners = re.findall(r"^# =+\n# (PART I+: .+|\d+\. .+)\n# =+\n(.*)$", source, re.M)
    for entry, (title, question) in zip(promised, banners, strict=True):
        assert re.findall(r"\w+", entry.upper()) == re.findall(r"\w+", title.upper())
        if not title.startswith("PART"):
            assert re.fullmatch(r"# Question answered here: .+\?", question), title
    assert len(banners) == 3 + 21


def test_the_switch_reaches_every_loop(one, c, tmp_path, monkeypatch):
    """With C every function of _helpers.c runs, in each way to read samples; without C none."""
    assert not hasattr(one, "_megatron_min")
    kernels = c._megatron_min
    spy = mock.Mock(wraps=kernels)
    monkeypatch.setitem(sys.modules, "_megatron_min", spy)
    monkeypatch.delenv("MEGATRON_MIN_C", raising=False)
    mm = types.SimpleNamespace(**runpy.run_path(str(HERE / "megatron_min.py")))
    assert (one.IMPLEMENTATION, mm.IMPLEMENTATION) == ("python", "c")
    toy = mm.toy_corpus(tmp_path)
    for size, weights in ((6, [1, 2]), (None, None)):
        blend = build(mm, [size, 0, 0], config(mm, ([toy] * 2, weights)))[0]
    dataset = blend.datasets[0]
    for read in (blend.batch, dataset.batch, dataset.__getitems__):
        read([0])
    dataset[0]
    mm.shuffle(np.arange(5000), np.random.RandomState(1))  # fewer are shuffled by numpy
    assert spy.read_samples.call_count == 4
    loops = {name for name in dir(kernels) if not name.startswith("_")}
    assert {call[0] for call in spy.mock_calls} == loops


def test_doctests_of_the_module(mm, monkeypatch, tmp_path):
    monkeypatch.setattr(mm.tempfile, "tempdir", str(tmp_path))
    result = doctest.testmod(mm)
    assert result.failed == 0
    assert result.attempted > 40


def test_doctests_of_the_readme(one, monkeypatch, tmp_path):
    if not (HERE / "README.md").exists():
        pytest.skip("README.md is not beside this file")
    monkeypatch.setattr(one.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(sys.modules, "megatron_min", one)
    result = doctest.testfile(str(HERE / "README.md"), module_relative=False)
    assert result.failed == 0
    assert result.attempted > 0


def test_all_names_what_is_public(one):
    assert all(hasattr(one, name) for name in one.__all__)
    assert len(set(one.__all__)) == len(one.__all__)


# ==============================================================================
# 1. The file pair
# ==============================================================================

PAIR = [[1] * 3, [2] * 2, [], [3] * 4]  # the documents of the fixture pair


@pytest.fixture
def pair(one, tmp_path):
    """The prefix of a corpus of four documents, int32, of which one is empty."""
    return mk(one, tmp_path / "pair", PAIR)


# -- The format --------------------------------------------------------------------------------


def idx_bytes(lengths, documents, code=4, size=4, modes=()):
    """The .idx that the format's table asks for, by struct alone."""
    pointers = [size * sum(lengths[:i]) for i in range(len(lengths))]
    return (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *pointers)
        + struct.pack(f"<{len(documents)}q", *documents)
        + struct.pack(f"<{len(modes)}b", *modes)
    )


# the dtypes of the format's codes 1, 2, ...
DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16]


@pytest.mark.parametrize("code, dtype", list(enumerate(DTYPES, 1)))
def test_a_pair_of_every_dtype(one, tmp_path, code, dtype):
    """The bytes on disk, and what is read back, mapped or not."""
    size = np.dtype(dtype).itemsize
    assert (one.DType.code_from_dtype(dtype), one.DType.dtype_from_code(code)) == (code, dtype)
    assert one.DType.size(code) == one.DType.size(dtype) == size
    docs = [np.array([1, 2, 100], dtype), np.array([], dtype), np.array([7], dtype)]
    prefix = mk(one, tmp_path / "p", docs, dtype)
    assert (tmp_path / "p.bin").read_bytes() == np.array([1, 2, 100, 7], dtype).tobytes()
    assert (tmp_path / "p.idx").read_bytes() == idx_bytes([3, 0, 1], range(4), code, size)
    for mmap in (True, False):
        ds = one.IndexedDataset(prefix, mmap=mmap)
        assert ds.dtype is dtype
        for found, wanted in zip(ds[:], docs, strict=True):
            same(found, wanted)
        same(ds.sequence_lengths, np.array([3, 0, 1], np.int32))
        same(ds.sequence_pointers, np.array([0, 3, 3], np.int64) * size)
        same(ds.document_indices, np.arange(4, dtype=np.int64))
        assert ds.sequence_modes is None
        assert ds.index is ds  # upstream: the arrays are attributes of ds.index


def test_dtypes_of_vocabularies_and_codes_that_are_none(one, tmp_path):
    """A vocabulary below 65500 is stored in two bytes."""
    assert one.DType.optimal_dtype(65499) is np.uint16
    assert one.DType.optimal_dtype(65500) is one.DType.optimal_dtype(None) is np.int32
    for code in (0, 9):
        with pytest.raises(ValueError, match=f"code {code}"):
            one.DType.dtype_from_code(code)
    with pytest.raises(ValueError, match="complex64"):
        one.IndexedDatasetBuilder(tmp_path / "p.bin", np.complex64)
    assert os.listdir(tmp_path) == []


def test_a_pair_exists_if_both_files_do(one, pair):
    """The error names the one that does not, at once.  Upstream: 70 seconds of retries."""
    for path in (one.get_bin_path(pair), one.get_idx_path(pathlib.Path(pair))):
        assert one.IndexedDataset.exists(pair)
        os.rename(path, f"{path}.away")
        assert not one.IndexedDataset.exists(pathlib.Path(pair))
        with pytest.raises(FileNotFoundError, match=re.escape(path)):
            one.IndexedDataset(pair)
        os.rename(f"{path}.away", path)


# -- Reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("docs", [[[1, 2, 3], [4, 5], [], [6, 7, 8, 9]], [], [[], []]], ids=str)
def test_sequences_are_read_as_from_a_list(one, tmp_path, docs, mmap):
    """Upstream: no empty slices nor datasets, and get() reads on behind the sequence."""
    ds = one.IndexedDataset(mk(one, tmp_path / "p", docs), mmap=mmap)
    n = len(docs)
    assert (len(ds), lists(ds), ds.document_indices.tolist()) == (n, docs, list(range(n + 1)))
    for i in (n, -n - 1, 10**12, 2**70):
        with pytest.raises(IndexError, match=f"index {i} of .*/p,"):
            ds[i]
    for start, stop in itertools.product([None, *range(-5, 6)], repeat=2):
        assert lists(ds[start:stop]) == docs[start:stop]
    with pytest.raises(ValueError, match="step 2"):
        ds[::2]
    places = itertools.product(range(-n, n), range(-2, 6), [None, *range(-1, 6)])
    for i, offset, length in places:
        assert ds[np.int64(i)].tolist() == docs[i]
        size = len(docs[i])
        end = size if length is None else offset + length
        if 0 <= offset <= end <= size:
            same(ds.get(i, offset, length), np.array(docs[i][offset:end], np.int32))
        else:
            with pytest.raises(IndexError, match=f"/p: .*sequence {i % n},"):
                ds.get(i, offset, length)


def test_a_read_of_a_mapped_pair_is_a_view(one, pair):
    """It is read-only, and keeps the mapping alive, but nothing pins a dataset that is dropped.

    Upstream: a segmentation fault, or a dataset that stays for ever.
    """
    ds = one.IndexedDataset(pair, mmap=False)
    assert not np.shares_memory(ds[0], ds[0])
    ds = one.IndexedDataset(pair, mmap=True)
    views = [ds[0], ds[0:1][0], ds.get(0, 0)]
    for tokens in views:
        assert np.shares_memory(tokens, views[0])
        assert not tokens.flags.writeable
    lengths = ds.sequence_lengths
    dropped = weakref.ref(ds)
    del ds
    gc.collect()
    assert dropped() is None
    for extension in (".bin", ".idx"):
        os.unlink(pair + extension)
    assert lists([*views, lengths]) == [[1] * 3] * 3 + [[3, 2, 0, 4]]


def test_reads_of_an_open_file(one, pair):
    """In several steps where the system returns fewer bytes than asked for; never too few in all.

    Upstream: tokens of memory that nobody has written.
    """
    content = pathlib.Path(f"{pair}.bin").read_bytes()
    ds = one.IndexedDataset(pair, mmap=False)
    steps = [content[4:9], content[9:11], content[11:12]]
    with mock.patch.object(os, "pread", side_effect=steps) as pread:
        assert ds.get(0, 1, 2).tolist() == [1, 1]
    wanted = [(8, 4), (3, 9), (1, 11)]  # bytes that are missing, and their place
    assert [call.args[1:] for call in pread.call_args_list] == wanted
    os.truncate(f"{pair}.bin", 35)
    assert lists(ds[:3]) == PAIR[:3]
    for place in (3, slice(2, 4)):
        with pytest.raises(one.DatasetFormatError, match=r"pair\.bin: bytes at 20"):
            ds[place]


def test_a_multimodal_pair_gives_tokens_and_modes(one, pair, tmp_path):
    """Upstream: the modes cannot be read back."""
    with one.IndexedDatasetBuilder(tmp_path / "m.bin", multimodal=True) as builder:
        builder.add_document([1, 2, 3, 4, 5], [1, 2, 2], [1, -2, 7])
    ds = one.IndexedDataset(tmp_path / "m", multimodal=True)
    same(ds.sequence_modes, np.array([1, -2, 7], np.int8))
    for (tokens, mode), wanted in ((ds[1], ([2, 3], -2)), (ds.get(-1, 1), ([5], 7))):
        assert (tokens.tolist(), mode) == wanted
    sequences, modes = ds[1:]
    assert (lists(sequences), modes.tolist()) == ([[2, 3], [4, 5]], [-2, 7])
    same(pickle.loads(pickle.dumps(ds)).sequence_modes, ds.sequence_modes)
    assert lists(one.IndexedDataset(tmp_path / "m")) == [[1], [2, 3], [4, 5]]  # tokens alone
    with pytest.raises(one.DatasetFormatError, match="modes"):
        one.IndexedDataset(pair, multimodal=True)


@pytest.mark.slow
@linux
def test_a_pair_of_more_than_2_32_tokens(mm, tmp_path):
    """What lies far behind is found, by get() and in samples.  The .bin takes no room on disk."""
    most = 2**31 - 1  # the longest sequence
    prefix = str(tmp_path / "p")
    pathlib.Path(f"{prefix}.idx").write_bytes(idx_bytes([most, most, 5], range(4), 1, 1))
    pathlib.Path(f"{prefix}.bin").touch()
    os.truncate(f"{prefix}.bin", 2 * most + 5)
    patch(f"{prefix}.bin", 2 * most - 1, bytes([4, 5, 0, 0, 0, 6]))
    for mmap in (True, False):
        ds = mm.IndexedDataset(prefix, mmap=mmap, check=True)
        assert lists([ds.get(1, most - 2, 2), ds[2]]) == [[0, 4], [5, 0, 0, 0, 6]]
    train = gpt(mm, prefix, sequence_length=2**20)
    assert train.dataset.sequence_lengths.sum(dtype=np.int64) == 2**32 + 3
    assert len(train) == 2**12
    for k in range(0, len(train), 100):
        i, offset, _ = train.pieces(k)[0]
        patch(f"{prefix}.bin", i * most + offset, b"\7")
        assert train[k]["tokens"][0] == 7


@linux
def test_opening_reads_a_few_pages_of_an_index(one, tmp_path):
    """Whatever its size: here 200 MB, of which all but both ends are a hole in the file."""
    resource = importlib.import_module("resource")
    n = 10**7
    (tmp_path / "p.idx").write_bytes(idx_bytes([], [])[:18] + struct.pack("<QQ", n, n + 1))
    os.truncate(tmp_path / "p.idx", 34 + 20 * n + 8)
    patch(tmp_path / "p.idx", -8, struct.pack("<q", n))
    (tmp_path / "p.bin").touch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ds = one.IndexedDataset(tmp_path / "p")
    assert (len(ds), ds.identity()["idx_size"]) == (n, 34 + 20 * n + 8)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 500


# -- Is a pair what its format says? -----------------------------------------------------------
#

FORGED = [-(2**63), -1, 0, 1, 2**31, 2**63 - 1]


def damages_of(content):
    """Contents of a file of which one byte, or one number, is another, or that ends too early."""
    for at in range(len(content)):
        for bits in (1, 13, 128):
            yield content[:at] + bytes([content[at] ^ bits]) + content[at + 1 :]
        yield content[:at]
    for at in range(2, len(content), 4):  # here all numbers of an .idx begin
        for number in FORGED:
            forged = content[:at] + struct.pack("<q", number) + content[at + 8 :]
            yield forged[: len(content)]
    yield content + content[-1:]


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("modes", [(), (1, -2, 0, 7)], ids=["plain", "moded"])
def test_a_damaged_index_is_refused_or_read_in_bounds(one, tmp_path, modes, mmap):
    """Wherever it is damaged.  What opens gives what is in the .bin at this place, or an error.

    And what verify() lets pass is what the format's table asks for.
    """
    tokens = bytes(range(36))
    (tmp_path / "p.bin").write_bytes(tokens)
    whole = idx_bytes([3, 2, 0, 4], [0, 1, 3, 3, 4], modes=modes)
    opened = 0
    for damaged in damages_of(whole):
        (tmp_path / "p.idx").write_bytes(damaged)
        try:
            ds = one.IndexedDataset(tmp_path / "p", len(modes) > 0, mmap)
        except one.DatasetFormatError as error:
            assert re.search(r"/p\.(idx|bin): .+: wanted .+, got .+", str(error), re.DOTALL)
            assert damaged != whole
            continue
        opened += 1
        code, size = one.DType.code_from_dtype(ds.dtype), one.DType.size(ds.dtype)
        lengths, documents = lists([ds.sequence_lengths, ds.document_indices])
        of_modes = damaged[34 + 12 * len(lengths) + 8 * len(documents) :]
        assert len(of_modes) == len(lengths) or (len(of_modes) == 0 and not modes)
        assert (documents[0], documents[-1]) == (0, len(lengths))
        for i, pointer in enumerate(ds.sequence_pointers.tolist()):
            end = pointer + size * lengths[i]
            if 0 <= pointer <= end <= 36 and pointer % size == 0:
                found = ds[i][0] if modes else ds[i]
                assert found.tobytes() == tokens[pointer:end]
            else:
                with pytest.raises(one.DatasetFormatError, match=rf"p\.idx: sequence {i}:"):
                    ds[i]
        wanted = idx_bytes(lengths, documents, code, size, np.frombuffer(of_modes, np.int8))
        if damaged == wanted and min(lengths) >= 0 and documents == sorted(documents):
            ds.verify()
        else:
            with pytest.raises(one.DatasetFormatError, match=r"p\.idx: \w+\[\d\]: wanted"):
                ds.verify()
    assert opened > 100


def test_a_bin_of_another_size_is_refused(one, pair, tmp_path):
    """Also one that ends within a token.  Upstream: read as if it were right."""
    for size in (40, 37, 35, 0):
        os.truncate(f"{pair}.bin", size)
        with pytest.raises(one.DatasetFormatError, match=r"pair\.bin: file size"):
            one.IndexedDataset(pair)
    (tmp_path / "odd.bin").write_bytes(bytes(9))
    (tmp_path / "odd.idx").write_bytes(idx_bytes([2], [0, 1]))
    patch(tmp_path / "odd.idx", 38, b"\1")  # the pointer
    with pytest.raises(one.DatasetFormatError, match="multiple of 4"):
        one.IndexedDataset(tmp_path / "odd")


def test_the_whole_check_sees_each_entry_of_a_long_index(one, tmp_path):
    """Also where entries are looked at some thousand at a time.  All documents are empty."""
    n = 50_000
    whole = idx_bytes([], [])[:18] + struct.pack("<QQ", n, n + 1) + bytes(12 * n)
    whole += np.arange(n + 1, dtype=np.int64).tobytes()
    (tmp_path / "p.bin").touch()
    for place in (1, 2**13 - 1, 2**14 - 1, 2**14, 2**14 + 1, 2**15, 49_998):
        wrong = {  # the entry that is named: where it lies, and a value of it
            f"sequence_lengths[{place}]": (34 + 4 * place, "<i", -1),
            f"sequence_pointers[{place}]": (34 + 4 * n + 8 * place, "<q", 4),
            f"sequence_pointers[{place + 1}]": (34 + 4 * place, "<i", 1),  # a length that is not 0
            f"document_indices[{place}]": (34 + 12 * n + 8 * place, "<q", place - 2),
        }
        for entry, (offset, code, value) in wrong.items():
            (tmp_path / "p.idx").write_bytes(whole)
            one.IndexedDataset(tmp_path / "p", check=True)
            patch(tmp_path / "p.idx", offset, struct.pack(code, value))
            with pytest.raises(one.DatasetFormatError, match=re.escape(f"p.idx: {entry}: ")):
                one.IndexedDataset(tmp_path / "p", check=True)


def test_the_whole_check_sees_the_first_pointer_and_more_documents_than_sequences(one, tmp_path):
    """A token before sequence 0; and a wrong document that is behind all sequences."""
    whole = idx_bytes([1, 1], [0, 2])
    pointers = whole[:42] + struct.pack("<2q", 4, 8) + whole[58:]
    documents = idx_bytes([3], [0] * 32770 + [5, 1])
    for content, entry in ((pointers, "pointers[0]"), (documents, "indices[32771]")):
        (tmp_path / "p.idx").write_bytes(content)
        (tmp_path / "p.bin").write_bytes(bytes(12))
        with pytest.raises(one.DatasetFormatError, match=re.escape(entry)):
            one.IndexedDataset(tmp_path / "p").verify()


# -- Is a pair the one that it was? ------------------------------------------------------------


def replace_tokens(prefix):
    """Another .bin of the same size comes to the place of the old one."""
    os.utime(f"{prefix}.bin", (1, 1))
    pathlib.Path(f"{prefix}.new").write_bytes(bytes(36))
    os.replace(f"{prefix}.new", f"{prefix}.bin")


def change_index(prefix):
    """The .idx is written again."""
    patch(f"{prefix}.idx", 0, b"M")
    os.utime(f"{prefix}.idx", (1, 1))


def test_a_pair_that_is_replaced_while_it_is_opened_is_refused(one, pair, monkeypatch):
    """The .idx of the old pair must not be used with a .bin of equal size of the new one.

    Another process would meet this moment too seldom: here what maps the .idx replaces the pair.
    """
    map_file = np.memmap

    def map_and_replace(path, *arguments):
        mapped = map_file(path, *arguments)
        if str(path).endswith(".idx"):
            replace_tokens(pair)
            change_index(pair)
        return mapped

    monkeypatch.setattr(np, "memmap", map_and_replace)
    with pytest.raises(one.DatasetFormatError, match=r"pair\.idx: .* another"):
        one.IndexedDataset(pair)


@pytest.mark.parametrize("mmap", [True, False])
def test_a_pair_that_is_written_again_under_a_reader(mm, tmp_path, mmap):
    """What is open keeps its data, also where the sizes are equal; what is opened then has the new.

    Upstream: other tokens under the job, or a SIGBUS.
    """
    opened = []
    for token in (1, 2):
        prefix = mk(mm, tmp_path / "p", [[token] * 9] * 9)
        opened.append(quiet(gpt, mm, prefix, sequence_length=4, mmap_bin_files=mmap))
    for token, ds in zip((1, 2), opened, strict=True):
        assert (ds.batch(range(len(ds)))["tokens"] == token).all()


def test_identity_tells_one_index_from_another(one, tmp_path):
    """By its size, its time, and its first and last page; section 12 tries the first two."""
    prefix = mk(one, tmp_path / "p", [[1]] * 7000)
    identities = set()
    for length, document in ((1, 0), (2, 0), (2, 1)):
        patch(f"{prefix}.idx", 34, bytes([length]))  # in the first page
        patch(f"{prefix}.idx", -16, bytes([document]))  # in the last
        os.utime(f"{prefix}.idx", (1, 1))
        for _ in range(2):
            identities.add(str(one.IndexedDataset(prefix).identity()))
    assert len(identities) == 3


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("replace", [replace_tokens, change_index])
def test_a_pickle_is_the_path_and_what_the_files_were(one, bucket, pair, replace, is_remote):
    """Who unpickles it opens the files again.  Upstream: whatever is there then."""
    place = bucket.put(pair) if is_remote else pair
    settings = one.ObjectStorageConfig(bin_chunk_nbytes=100)
    pickled = pickle.dumps(one.IndexedDataset(place, False, is_remote, settings, check=True))
    assert len(pickled) < 500
    again = copy.deepcopy(pickle.loads(pickled))
    assert (again.mmap, again.check, lists(again)) == (is_remote, True, PAIR)
    assert again.object_storage_config == settings
    replace(pair)
    bucket.put(pair)
    with pytest.raises(one.DatasetFormatError, match="/pair: .*replaced"):
        pickle.loads(pickled)


# -- The builder -------------------------------------------------------------------------------


def test_sequences_are_added_in_many_ways(mm, tmp_path):
    """Tensors, arrays and lists; a document goes on until it is ended.

    Modes are 0 where none are given.  Upstream: they cannot be left out.
    """
    with mm.IndexedDatasetBuilder(tmp_path / "m.bin", np.int16, multimodal=True) as builder:
        builder.add_document([1, 2, 3], (n for n in (1, 2)), [1, -2])
        builder.add_document([np.array([4, 5]), torch.tensor([6, 7])], [4])
        builder.add_item(torch.tensor([[8], [9]]), mode=3)  # flattened
        builder.add_item(np.array([], np.float64))
        builder.end_document()
        builder.add_item((10,))
        builder.end_document()
        builder.add_document(["11", "12"], [2], [4])  # as upstream's own tests have them
        builder.end_document()
        builder.add_item([["13"], ["014"]], mode=5)
        builder.end_document()
    lengths, modes = [1, 2, 4, 2, 0, 1, 2, 2], [1, -2, 0, 3, 0, 0, 4, 5]
    wanted = idx_bytes(lengths, [0, 2, 3, 5, 6, 7, 7, 8], code=3, size=2, modes=modes)
    assert (tmp_path / "m.idx").read_bytes() == wanted
    assert (tmp_path / "m.bin").read_bytes() == np.arange(1, 15, dtype="<i2").tobytes()
    with mm.IndexedDatasetBuilder(tmp_path / "p.bin") as builder:  # int32
        builder.add_document([1, 2], [2])
    assert (tmp_path / "p.bin").read_bytes() == np.array([1, 2], "<i4").tobytes()
    assert (tmp_path / "p.idx").read_bytes() == idx_bytes([2], [0, 1], code=4, size=4)


# name: (dtype, method, arguments, the error, the word that matters)
REFUSED_BY_BUILDER = {
    # upstream: such ids are wrapped, and written as others
    "too-large": (np.uint16, "add_item", (torch.tensor([1, 70000, -1]),), ValueError, "70000"),
    "text-too-large": (np.uint16, "add_item", (["1", "70000"],), ValueError, "70000"),
    "negative": (np.uint16, "add_item", (np.array([-1]),), ValueError, "-1"),
    "uint64": (np.int64, "add_item", (np.array([2**63], np.uint64),), ValueError, str(2**63)),
    "beyond-64-bits": (np.int64, "add_item", ([2**70],), ValueError, "object"),
    "float": (np.int32, "add_item", (np.array([1.5]),), ValueError, "float64"),
    "lengths-short": (np.int32, "add_document", ([1, 2, 3], [2]), ValueError, "3 tokens"),
    "length-negative": (np.int32, "add_document", ([1], [-1, 2]), ValueError, "-1"),
    "length-2**31": (np.int32, "add_document", ([1], [2**31]), ValueError, str(2**31)),
    "length-float": (np.int32, "add_document", ([1, 2], [2.0]), TypeError, "float"),
    "modes-few": (np.int32, "add_document", ([1, 2], [1, 1], [0]), ValueError, "1 modes"),
    "mode-too-large": (np.int32, "add_document", ([1], [1], [128]), ValueError, "128"),
}


@pytest.mark.parametrize("case", REFUSED_BY_BUILDER)
def test_a_builder_refuses_before_it_writes(mm, tmp_path, case):
    dtype, method, arguments, error, word = REFUSED_BY_BUILDER[case]
    with mm.IndexedDatasetBuilder(tmp_path / "p.bin", dtype, multimodal=True) as builder:
        builder.add_document([1, 2], [2], [7])
        with pytest.raises(error, match=re.escape(word)):
            getattr(builder, method)(*arguments)
        builder.add_document([3], [1])
    ds = mm.IndexedDataset(tmp_path / "p", multimodal=True)
    assert [(tokens.tolist(), mode) for tokens, mode in ds] == [([1, 2], 7), ([3], 0)]


def test_finalize_gives_both_files_their_names_once(one, tmp_path):
    """Nothing can be added after it, and nothing is finalized whose last document has no end."""
    builder = one.IndexedDatasetBuilder(tmp_path / "p.bin")
    builder.add_item([1])
    assert not one.IndexedDataset.exists(tmp_path / "p")
    with pytest.raises(ValueError, match="end_document"):
        builder.finalize(tmp_path / "p.idx")
    builder.end_document()
    builder.finalize(tmp_path / "p.idx")
    for method, argument in (("finalize", tmp_path / "p.idx"), ("add_item", [2])):
        with pytest.raises(ValueError, match="closed"):
            getattr(builder, method)(argument)
    assert lists(one.IndexedDataset(tmp_path / "p")) == [[1]]
    assert sorted(os.listdir(tmp_path)) == ["p.bin", "p.idx"]


@linux
@pytest.mark.parametrize("size", [1, 1 << 22])
def test_a_builder_whose_write_failed_stays_failed(one, tmp_path, size):
    """Also where there is room again, and where a with block caught the error: there is no pair."""
    builder = one.IndexedDatasetBuilder(tmp_path / "p.bin", np.uint8)
    with pytest.raises(ValueError, match="closed"), builder:
        builder.add_document(np.ones(size, np.uint8), [size])
        with pytest.raises(OSError) as caught, files_of_64_kib():
            builder.add_document(np.ones(3 << 20, np.uint8), [3 << 20])
        assert caught.value.errno == errno.EFBIG
        with pytest.raises(ValueError, match="closed"):
            builder.add_item([2])
    assert os.listdir(tmp_path) == []


@contextlib.contextmanager
def files_of_64_kib():
    """A limit on the bytes of a file, which stands in for a full disk."""
    resource = importlib.import_module("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# -- A whole pair is appended ------------------------------------------------------------------


@pytest.mark.parametrize("multimodal", [False, True])
def test_merge_equals_one_builder(one, tmp_path, multimodal):
    """Also of a prefix alone, and where it replaces an older pair."""
    docs = {"a": [[1, 2], [], [3]], "empty": [], "c": [[4], [5, 6, 7]]}
    docs["whole"] = docs["a"] + docs["c"] + docs["a"]
    for name in docs:
        with one.IndexedDatasetBuilder(tmp_path / f"{name}.bin", np.uint16, multimodal) as builder:
            for doc in docs[name]:
                builder.add_document(doc, [len(doc), 0], [len(doc), 2])
    whole = iter([tmp_path / name for name in ("a", "empty", "c", "a")])
    for parts, name in ((tmp_path / "a", "a"), (whole, "whole")):
        one.merge(parts, tmp_path / "merged", multimodal)
        assert bytes_of_pair(tmp_path / "merged") == bytes_of_pair(tmp_path / name)


def test_a_long_pair_is_appended_in_parts(one, bucket, tmp_path):
    """Its tokens, which come from object storage here, are never in memory as a whole."""
    size = 40 << 20
    tokens = np.tile(np.arange(251, dtype=np.uint8), size // 251 + 1)[:size]
    remote = bucket.put(mk(one, tmp_path / "p", [tokens], np.uint8))
    with one.IndexedDatasetBuilder(tmp_path / "o.bin", np.uint8) as builder:
        tracemalloc.start()
        builder.add_index(remote)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < size / 2
    same(one.IndexedDataset(tmp_path / "o")[0], tokens)


def test_a_merge_that_is_refused_changes_nothing(one, pair, tmp_path):
    """And leaves the folder as it was.  Upstream: an input that is the output too is destroyed."""
    other = mk(one, tmp_path / "other", [[1]], np.uint16)
    os.symlink(pair + ".bin", tmp_path / "link.bin")
    damaged = mk(one, tmp_path / "damaged", [[1], [2]])
    patch(f"{damaged}.idx", 42, b"\4")  # the first pointer
    with one.IndexedDatasetBuilder(tmp_path / "modes.bin", multimodal=True) as builder:
        builder.add_document([1, 2], [1, 1], [0, 1])
    before = files_of(tmp_path)
    out = tmp_path / "out"
    for inputs, output, kind, word in (
        ([pair, pair], f"{tmp_path}/./pair", ValueError, "output"),
        ([pair], tmp_path / "link", ValueError, "output"),
        ([pair, tmp_path / "none"], out, FileNotFoundError, "none"),
        ([pair, other], out, ValueError, "uint16"),
        ([pair, tmp_path / "modes"], out, ValueError, r"modes\.bin .*multimodal"),
        ([pair, damaged], out, one.DatasetFormatError, "sequence_pointers"),
        ([pair], tmp_path / "none" / "out", FileNotFoundError, "folder"),
    ):
        with pytest.raises(kind, match=word):
            one.merge(inputs, output)
        assert files_of(tmp_path) == before


# ==============================================================================
# 2. Text to tokens
# ==============================================================================


def texts_of(mm, prefix):
    """The documents of a pair as lists of ids, empty ones too."""
    ds = mm.IndexedDataset(prefix, check=True)
    documents = []
    for first, end in itertools.pairwise(ds.document_indices.tolist()):
        documents.append([token for sequence in ds[first:end] for token in sequence.tolist()])
    return documents


def test_bytes_are_tokens(one):
    tokenizer = one.ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert json.loads(json.dumps(tokenizer.unique_identifiers)) == tokenizer.unique_identifiers
    ids_of = {"": [], "ab": [97, 98], "é": [195, 169], "a\n€": [97, 10, 226, 130, 172]}
    assert lists(tokenizer.tokenize_batch(list(ids_of))) == list(ids_of.values())
    for text, ids in ids_of.items():
        assert tokenizer.tokenize(text) == ids
        assert tokenizer.detokenize(np.array([*ids, 256], np.uint16)) == text, "eod is no text"
        assert tokenizer.detokenize([*ids, 300]) == text, "an id of another tokenizer"
        for no_text in (195, 255):  # half of é, and a byte that no text has
            assert tokenizer.detokenize([*ids, no_text]) == text + "\N{REPLACEMENT CHARACTER}"


TEXTS = [  # a text, its sequences, these with an eod; " " is a text, but no token
    ("1 2", [[1, 2]], [[1, 2, 0]]),
    ("", [], []),
    (" ", [], []),
    ("0", [[0]], [[0, 0]]),
    (["1 2", "3"], [[1, 2], [3]], [[1, 2], [3, 0]]),
    (["1", "", "2 3", " "], [[1], [2, 3]], [[1], [2, 3, 0]]),
    ([], [], []),
    (["", " "], [], []),
]


@pytest.mark.parametrize("append_eod", [False, True])
def test_a_text_is_a_sequence_and_so_is_each_of_a_list_of_sentences(one, tmp_path, append_eod):
    """A list of sentences is a document of several sequences, as for upstream's tool.

    Each line of a file is a document, and preprocess() writes the same pair.
    """
    all_sequences = []
    ends = [0]
    for text, plain, with_eod in TEXTS:
        sequences = with_eod if append_eod else plain
        assert one.encode_document(text, Tok(), append_eod=append_eod) == sequences
        all_sequences += sequences
        ends.append(len(all_sequences))
    assert one.encode_document("7", Tok()) == [[7]], "no eod by default"
    path = jsonl(tmp_path / "a.jsonl", [text for text, _, _ in TEXTS])
    one.encode_jsonl(path, tmp_path / "plain", Tok(), append_eod=append_eod)
    made = one.preprocess(path, tmp_path / "fast", Tok(), append_eod=append_eod)
    for prefix in (tmp_path / "plain", made["text"]):
        ds = one.IndexedDataset(prefix)
        assert (lists(ds), ds.document_indices.tolist()) == (all_sequences, ends)


LINES_OF_TEXT = {  # the contents of a file, and its documents
    "nothing": (b"", []),
    "no newline at the end": (b'{"text": "1 2"}\n{"text": "3"}', [[1, 2, 0], [3, 0]]),
    "line ends of Windows": (b'{"text": "1"}\r\n{"text": ""}\r\n', [[1, 0], []]),
    "a return within a line": (b'{"text":\r"1"}\n', [[1, 0]]),
    "another key": (b'{"text": "1", "other": 3}\n', [[1, 0]]),
    "blank lines": (b'\n{"text": "1"}\n \t\r\n{"text": "2"}\n\n', [[1, 0], [2, 0]]),
}


@pytest.mark.parametrize("case", LINES_OF_TEXT)
def test_lines_become_documents(one, tmp_path, case):
    """One each, with an eod; blank lines are skipped.  preprocess() writes the same pair."""
    content, documents = LINES_OF_TEXT[case]
    (tmp_path / "a.jsonl").write_bytes(content)
    one.encode_jsonl(tmp_path / "a.jsonl", tmp_path / "plain", Tok(), append_eod=True)
    assert texts_of(one, tmp_path / "plain") == documents
    made = quiet(one.preprocess, tmp_path / "a.jsonl", tmp_path / "fast", Tok(), append_eod=True)
    assert bytes_of_pair(made["text"]) == bytes_of_pair(tmp_path / "plain")


def test_the_defaults_of_encode_jsonl(one, tmp_path):
    """Bytes, without eod, in the smallest dtype that has the vocabulary; a key finds the text."""
    path = jsonl(tmp_path / "a.jsonl", ["ab"], key="other")
    one.encode_jsonl(path, tmp_path / "out", json_key="other")
    assert texts_of(one, tmp_path / "out") == [[97, 98]]
    assert one.IndexedDataset(tmp_path / "out").dtype is np.uint16
    path = jsonl(tmp_path / "a.jsonl", ["1 70000"])
    one.encode_jsonl(path, tmp_path / "large", Tok(vocab_size=70001))
    assert texts_of(one, tmp_path / "large") == [[1, 70000]]


BAD_LINES = {
    "cut off": (b'{"text": "1"', ValueError),
    "another key": (b'{"other": "1"}', KeyError),
    "a token beyond uint16": (b'{"text": "70000"}', ValueError),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_leaves_no_pair(one, tmp_path, case):
    line, error = BAD_LINES[case]
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "1"}\n' + line + b'\n{"text": "2"}\n')
    with pytest.raises(error):
        one.encode_jsonl(tmp_path / "a.jsonl", tmp_path / "out", Tok())
    assert os.listdir(tmp_path) == ["a.jsonl"]


# ==============================================================================
# 3. Split, blend, config
# ==============================================================================

# -- Split -------------------------------------------------------------------------------------


def test_weights_are_divided_by_numpys_sum(one):
    """Which adds in groups, so that the last bit may be another one than that of a loop."""
    for rng in cases(100):
        weights = rng.random(rng.integers(1, 300)) * 100
        assert one.normalize(weights.tolist()) == (weights / np.sum(weights)).tolist()
        shares = np.where(rng.random(len(weights)) < 0.5, weights, 0).tolist()[:40] + [1.0]
        phases = [(9, shares), (9, shares)]
        datasets = [Bare(99, one.Split.train)] * len(shares)
        blend = one.BlendedDataset(datasets, None, None, config(one), phases=phases)
        used = [share for share in shares if share]
        for _, found in blend.phases:  # zeros in between do not group the others otherwise
            assert [share for share in found if share] == one.normalize(used)


def test_a_split_is_read(one):
    read = one.parse_and_normalize_split
    assert read("3,1") == [0.75, 0.25, 0.0]
    assert read("0,0,5.") == [0.0, 0.0, 1.0]
    assert read(".5,+.5") == [0.5, 0.5, 0.0]
    assert read("1e3,3E+3") == [0.25, 0.75, 0.0]  # upstream: e ends a number, so these are four
    for text in ("80 10 10", "80;10;10", "80/10/10", " [80, 10,10] "):
        assert read(text) == [0.8, 0.1, 0.1], text


@pytest.mark.parametrize("text", ["99,-1,0", "98,,2", "0,0,0", "1,2,3,4", "nan,1,0", "1e999,1"])
def test_a_wrong_split_is_refused(one, text):
    """Upstream drops signs and empty fields, and takes what is left."""
    with pytest.raises(ValueError, match=f"split '{text}'"):
        one.parse_and_normalize_split(text)


def test_split_by_hand(one):
    """Shares to fractions, fractions to documents."""
    assert {split.name: split.value for split in one.Split} == {"train": 0, "valid": 1, "test": 2}
    matrix = one.convert_split_vector_to_split_matrix
    assert matrix([0.99, 0.01, 0]) == [(0, 0.99), (0.99, 1.0), None]
    assert matrix([0, 0.25, 0.75]) == [None, (0, 0.25), (0.25, 1.0)]
    with pytest.raises(ValueError, match="vector_b"):
        matrix([0.5, 0.5, 0], [0.25, 0.75, 0])
    assert one.split_range((0, 0.98), 1000) == (0, 980)
    assert one.split_range((0, 0.5), 5) == (0, 2)  # Python rounds 2.5 to the even 2 ...
    assert one.split_range((0.5, 1.0), 7) == (4, 7)  # ... and 3.5 to the even 4
    assert one.split_range((0.99, 1.0), 3) == (3, 3)


def test_splits_hold_each_document_once(one):
    for rng in cases(100):
        shares = one.normalize(rng.integers(0, 9, 3) + [1, 0, 0])
        n = int(rng.integers(0, 1000))
        matrix = one.convert_split_vector_to_split_matrix(shares)
        ranges = [one.split_range(bounds, n) for bounds in matrix if bounds is not None]
        assert [i for first, end in ranges for i in range(first, end)] == list(range(n))


# -- Blend -------------------------------------------------------------------------------------


def test_a_list_is_read_as_prefixes_and_weights(one):
    """Weights and prefixes in turn, or prefixes alone; numbers are decimal numbers."""
    read = one.get_blend_from_list
    assert read(None) is None
    assert read(["p1"]) == (["p1"], None)
    assert read([30, "p1", 0.5, pathlib.Path("p2")]) == (["p1", "p2"], [30.0, 0.5])
    assert read([" 1e-3 ", " p1 "]) == (["p1"], [0.001])
    names = ["2023_01", "inf", "nan", "1e999"]  # float() takes each of these for a number
    assert read(names) == (names, None)
    assert read(["1", "./2023", "2", "infinity"]) == (["./2023", "infinity"], [1.0, 2.0])


@pytest.mark.parametrize(
    "blend",
    [["0.3", "A", "B", "C"], ["0.3", "A", "0.7"], [], ["A", "1"], ["1", "2"], "wiki"],
    ids=str,
)
def test_a_list_that_is_neither_is_refused(one, blend):
    """Upstream pairs them anyway, or takes weights for prefixes."""
    with pytest.raises(ValueError, match="prefixes"):
        one.get_blend_from_list(blend)


# -- Config ------------------------------------------------------------------------------------

PER_SPLIT = [(["q"], None), None, None]
PER_VALID = [None, (["q"], None), None]
WITHOUT_BLEND = {"blend": None, "split": None}
PHASES = [(4, [1])]
BAD_CONFIGS = {  # a word of the sentence: what is changed in a good config
    "sequence_length": [{"sequence_length": value} for value in (0, 8.0)],
    "random_seed": [{"random_seed": value} for value in (-1, 2**32)],
    "num_dataset_builder_threads": [{"num_dataset_builder_threads": 0}],
    "surplus": [{"mid_level_dataset_surplus": n} for n in (-0.1, math.nan)],
    "needs a split": [{"split": None}],
    "a blend is": [{"blend": blend} for blend in (([], None), ("p", None), ["p", "q", "r"])],
    "blend_per_split": [
        {"blend_per_split": PER_SPLIT, "blend": None},
        WITHOUT_BLEND | {"blend_per_split": PER_SPLIT[:2]},
        {"multiple_validation_sets": True},
    ],
    "list of weights": [{"blend": (["p"], 5)}],
    "1 weights for 2": [{"blend": (["p", "q"], [1.0])}],
    "weight of p": [{"blend": (["p", "q"], [w, 1.0])} for w in ("1", math.nan, -2)],
    "weight of q": [{"blend": (["p", "q"], [1.0, w])} for w in (math.inf, 10**309)],
    "phase 1: weight of p": [{"blend_phases": [(4, [1]), (4, [-1])]}],
    "phase 0": [{"blend_phases": [(0, [1])]}, {"blend_phases": [4]}],
    "sum": [{"blend": (["p", "q"], weights)} for weights in ([0.0, 0.0], [1e308, 1e308])],
    "blend_phases": [
        WITHOUT_BLEND | {"blend_phases": PHASES},
        WITHOUT_BLEND | {"blend_phases": PHASES, "blend_per_split": PER_VALID},
        {"blend_phases": PHASES, "split": "0,1,1"},
    ],
    "tokenizer": [{"tokenizer": None}],
    "hybrid_context_parallel": [{"hybrid_context_parallel": True}],
    "reset_attention_mask": [{"reset_attention_mask": True}],  # upstream: no effect, no word
}


@pytest.mark.parametrize("word", BAD_CONFIGS)
def test_a_bad_config_is_a_sentence(one, word):
    for fields in BAD_CONFIGS[word]:
        with pytest.raises(ValueError, match=word):
            config(one, **{"blend": (["p"], None), "split": "1"} | fields)


def test_a_config_derives_its_other_fields(one):
    cut = config(one, (["p"], None), split="3,1")
    assert (cut.mock, cut.split_matrix) == (False, [(0, 0.75), (0.75, 1.0), None])
    nothing = config(one, random_seed=0)
    assert (nothing.mock, nothing.split) == (True, "1,1,1")
    assert nothing.mid_level_dataset_surplus == 0.005
    forced = config(one, split="8,1,1")  # mock data has equal splits, whatever is asked for
    assert (forced.mock, forced.split, forced.split_matrix) == (True, "1,1,1", nothing.split_matrix)
    per_split = config(one, blend_per_split=PER_SPLIT)
    assert (per_split.mock, per_split.split, per_split.split_matrix) == (False, None, None)
    for empty in ([None] * 3, [], None):
        assert config(one, (["p"], None), blend_per_split=empty).blend_per_split is None
    assert config(one, create_attention_mask=True).has_dense_mask
    packed = config(one, create_attention_mask=True, inter_document_masking=True)
    assert not packed.has_dense_mask


def test_numpy_numbers_and_paths_are_taken(one, tmp_path):
    """They must not reach the JSON of a cache's description or of a state."""
    prefix = mk(one, tmp_path / "p", [[1] * 20] * 9)
    descriptions = []
    for path, number in ((prefix, int), (pathlib.Path(prefix), np.int64)):
        fields = {"random_seed": number(8), "sequence_length": number(4)}
        cfg = config(one, ([path], None), **fields)
        train = build(one, [number(20), 0, 0], cfg)[0]
        weights = [1, 0.5] if number is int else np.array([1, 0.5], np.float32)
        assert json.dumps(config(one, (["p", "q"], weights)).blend) == '[["p", "q"], [1.0, 0.5]]'
        blend = one.BlendedDataset([train] * 2, weights, number(4), cfg)
        loader = one.build_pretraining_data_loader(
            train, number(4), micro_batch_size=number(2), dataloader_type="cyclic", seed=number(1)
        )
        state = json.dumps(loader.state_dict())
        descriptions.append((train.unique_description, blend.unique_description, state))
    assert descriptions[0] == descriptions[1]


# ==============================================================================
# 4. Three orders
# ==============================================================================

# -- How many epochs and samples ---------------------------------------------------------------


def test_epochs_are_counted_one_by_one(one):
    """E by counting up, the number of samples by division, the last epoch by the 80 % rule."""
    counts = list(itertools.product(range(1, 9), range(1, 6), range(9)))
    counts += [(101, 1, 179), (101, 1, 180)]  # 79 and 80 of the last epoch's 100 samples
    for rng in cases(200):
        counts.append(rng.integers([2, 1, 1], [200, 20, 100]).tolist())
    for (tokens, S, wanted), x, drop in itertools.product(counts, (0, 1), (False, True)):
        epochs = 1
        while epochs * tokens < wanted * S + x:
            epochs += 1
        inputs = epochs * tokens - x
        num_samples = inputs // S if drop else math.ceil(inputs / S)
        before_final = max(0, (epochs - 1) * tokens - x) // S
        separate = epochs > 1 and wanted - before_final < int(0.80 * ((tokens - x) // S))
        plan = one.plan_epochs(tokens, wanted, S, drop, bool(x))
        if epochs > 1:
            of_final = wanted - plan.samples_before_final_epoch
            assert 0 <= of_final <= (tokens - x) // S + 1, (tokens, wanted, S, drop, x)
        assert plan == (epochs, num_samples, separate, before_final), (tokens, wanted, S, drop, x)


def test_a_split_without_tokens_has_no_samples(one):
    assert one.plan_epochs(0, 0, 4) == one.plan_epochs(0, None, 4) == (1, 0, False, 0)
    with pytest.raises(ValueError, match="no tokens"):  # upstream never returns
        one.plan_epochs(0, 1, 4)
    with pytest.raises(ValueError, match="num_samples"):
        one.plan_epochs(13, -1, 4)


@pytest.mark.parametrize("wanted", [2**43, 2**44 + 1, 2**70])
def test_counts_are_exact_integers(one, wanted):
    """Epochs of 13 tokens, samples of 2**20: exact, where a float would be rounded."""
    S = 2**20
    tokens = wanted * S + 1
    plan = one.plan_epochs(13, wanted, S)
    assert 13 * (plan.num_epochs - 1) < tokens <= 13 * plan.num_epochs
    assert one.count_samples(tokens, S) == one.count_samples(tokens, S, False) == wanted
    assert one.count_samples(tokens + 1, S) == wanted
    assert one.count_samples(tokens + 1, S, False) == wanted + 1


# -- The shuffles ------------------------------------------------------------------------------


def int32(*values):
    return np.array(values, np.int32)


ITEMS = [np.arange(5000).astype(dtype) for dtype in ("i4", "u4", "i8", float, "i2", ">i4", object)]
ITEMS += [np.arange(1500, dtype="i4"), np.arange(12).reshape(4, 3), list("abcdef")]


@pytest.mark.parametrize("items", ITEMS, ids=repr)
def test_shuffle_is_numpys(mm, items):
    """It does to the items and to the generator what numpy does; section 16 tries more states."""
    of_another_kind = np.random.RandomState(np.random.PCG64(7))
    for generator in (np.random.RandomState(7), of_another_kind, np.random.default_rng(7)):
        numpys = copy.deepcopy(generator)
        found = items.copy()
        wanted = items.copy()
        for _ in range(2):  # the second time begins in the middle of a block of numbers
            mm.shuffle(found, generator)
            numpys.shuffle(wanted)
            same(found, wanted)
        assert generator.bytes(4 * 624) == numpys.bytes(4 * 624)


def test_views_are_shuffled_in_place(mm):
    found = np.arange(9000)
    wanted = np.arange(9000)
    for step in (2, -1):
        mm.shuffle(found[::step], np.random.RandomState(3))
        np.random.RandomState(3).shuffle(wanted[::step])
        same(found, wanted)
    found.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        mm.shuffle(found, np.random.RandomState(0))


# -- The sample index --------------------------------------------------------------------------


def cut_into_samples(sizes, documents, S, drop_last, x):
    """The sample index by brute force: lay all tokens end to end, and cut.

    Row k is the place behind the last token of sample k - 1, x tokens back: sample k reads the
    extra token once more.
    """
    stream = []  # of each token: which document of the stream it is in, and its place there
    for d, document in enumerate(documents):
        for place in range(sizes[document]):
            stream.append((d, place))
    inputs = max(0, len(stream) - x)
    num_samples = inputs // S if drop_last else math.ceil(inputs / S)
    rows = [(0, 0)]
    for k in range(1, num_samples + 1):
        end = min(k * S + x, len(stream))
        d, place = stream[end - 1]
        rows.append((d, place + 1 - x))
    if num_samples * S > len(stream) and not x:  # upstream: the end of the last document
        rows[-1] = (len(documents) - 1, sizes[documents[-1]])
    return np.array(rows, np.int32)


def check_sample_index(mm, sizes, documents, S):
    """build_sample_idx() and count_samples() give what brute force gives."""
    arrays = np.array(sizes, np.int32), np.array(documents, np.int32)
    tokens = sum(sizes[document] for document in documents)
    for drop_last, x in itertools.product((True, False), (1, 0)):
        note = (sizes, documents, S, drop_last, x)
        wanted = cut_into_samples(sizes, documents, S, drop_last, x)
        assert mm.count_samples(tokens, S, drop_last, bool(x)) == len(wanted) - 1, note
        for epochs in (1, 2):  # their product is all that epochs and tokens_per_epoch say
            if tokens % epochs == 0:
                counts = epochs, tokens // epochs
                same(mm.build_sample_idx(*arrays, S, *counts, drop_last, bool(x)), wanted, note)


@pytest.mark.parametrize("S", [1, 2, 3, 5, 2**31 - 1, 2**31, 2**32 - 1])
def test_every_small_sample_index_by_brute_force(mm, S):
    """Of all corpora of up to three documents of up to three tokens."""
    for n in range(4):
        for sizes in itertools.product(range(4), repeat=n):
            check_sample_index(mm, sizes, range(n), S)


def test_random_sample_indices_by_brute_force(mm):
    for rng in cases(80):
        longest = rng.choice([3, 10, 200])
        sizes = rng.integers(0, longest, rng.integers(1, 20)).tolist()
        documents = rng.integers(0, len(sizes), rng.integers(1, 30)).tolist()
        check_sample_index(mm, sizes, documents, int(rng.integers(1, rng.choice([3, 9, 50]))))


def test_streams_longer_than_2_31_tokens_do_not_wrap(mm):
    """Documents of 2**31 - 1 tokens and one of a single token: the running count passes int32."""
    sizes = np.array([2**31 - 1, 1], np.int32)
    documents = np.array([0, 1, 0, 0], np.int32)  # they begin at 0, 2**31 - 1, 2**31, 2**32 - 1
    S = 2**30
    rows = mm.build_sample_idx(sizes, documents, S, 1, 3 * 2**31 - 2)
    wanted = [[0, 0], [0, S], [2, 0], [2, S], [3, 1], [3, S + 1]]
    same(rows, np.array(wanted, np.int32))


WRONG_STREAMS = {  # {(argument, error, what it names): wrong values}
    ("sizes", TypeError, "sizes"): [np.array([4, 3, 6]), [4, 3, 6]],
    ("sizes", ValueError, "size"): [int32(4, 3, -6), np.ones((3, 1), np.int32)],
    ("document_indices", TypeError, "document_indices"): [np.array([0, 1, 2])],
    ("document_indices", ValueError, "0 documents"): [int32()],
    ("document_indices", IndexError, r"document_indices\[1\] is 3 "): [int32(0, 3, 2)],
    ("document_indices", IndexError, r"document_indices\[1\] is -1 "): [int32(0, -1, 2)],
    # upstream: reads behind its arrays
    ("tokens_per_epoch", ValueError, "397 tokens"): [400],
    ("tokens_per_epoch", ValueError, "cannot hold"): [-13, 2**40, 2**62],
    ("num_epochs", ValueError, "cannot hold"): [-1],
    ("sequence_length", ValueError, "sequence_length"): [0, -4, 2**32, 2**70],
    ("sequence_length", TypeError, "float"): [4.5],
}


def test_a_wrong_stream_is_said(mm):
    stream = {"sizes": int32(4, 3, 6), "document_indices": int32(0, 1, 2), "sequence_length": 4}
    stream |= {"num_epochs": 1, "tokens_per_epoch": 13}
    for (argument, error, word), values in WRONG_STREAMS.items():
        for value in values:
            with pytest.raises(error, match=word):
                mm.build_sample_idx(**stream | {argument: value})


def test_long_orders_have_64_bits(one):
    """Only which dtype they get: an order of this length would take 16 GB."""
    assert one._sample_index_dtype(2**31 - 1) is np.int32
    assert one._sample_index_dtype(2**31) is np.int64
    assert one._shuffle_index_dtype(2**32 - 3) is np.uint32
    assert one._shuffle_index_dtype(2**32 - 2) is np.int64


def test_partial_samples_are_counted_in_integers(mm):
    """Upstream divides in float32: here it would leave out the last sample."""
    sizes = np.full(1025, 2**15, np.int32)
    sizes[-1] = 2
    rows = mm.build_sample_idx(sizes, np.arange(1025, dtype=np.int32), 1024, 1, 2**25 + 2, False)
    assert len(rows) == 32769 + 1
    assert rows[-1].tolist() == [1024, 1]
    # a longer stream, which no array has to hold: there float32 counts four samples too many
    assert mm.count_samples(2**40 + 70000, 16384, False) == 2**26 + 5


# -- Both orders, and stable_order -------------------------------------------------------------


def random_orders(rng):
    """The fields of a config that change the orders of a validation set."""
    return {
        "sequence_length": int(rng.integers(1, 12)),
        "random_seed": int(rng.integers(2**32)),
        "add_extra_token_to_sequence": bool(rng.integers(2)),
        "drop_last_partial_validation_sequence": bool(rng.integers(2)),
    }


def epochs_of_samples(plan, tokens, S, x):
    """Of each sample, in the order of the stream, the epoch in which its last token is."""
    epochs = []
    for k in range(plan.num_samples):
        end = min((k + 1) * S + x, plan.num_epochs * tokens)
        epochs.append((end - 1) // tokens)
    return epochs


def orders_by_hand(ds, plan, epochs):
    """document_index and shuffle_index by numpy's shuffle."""
    documents = np.tile(ds.indices, plan.num_epochs).astype(np.int32)
    samples = np.arange(plan.num_samples, dtype=np.uint32)
    num_documents = len(ds.indices)
    seed = ds.config.random_seed
    turns = []  # (seed of a generator, what it shuffles)
    if ds.config.stable_order:
        for epoch in range(plan.num_epochs):
            first, end = np.searchsorted(epochs, [epoch, epoch + 1])
            of_epoch = documents[epoch * num_documents : (epoch + 1) * num_documents]
            turns.append(([seed, epoch] if epoch else seed, [of_epoch, samples[first:end]]))
    elif plan.separate_final_epoch:
        parts = np.split(documents, [len(documents) - num_documents])
        parts += np.split(samples, [plan.samples_before_final_epoch])
        turns.append((seed, parts))
    else:
        turns.append((seed, [documents, samples]))
    for seed, parts in turns:
        random_state = np.random.RandomState(seed)
        for part in parts:
            random_state.shuffle(part)
    return documents, samples


@pytest.mark.parametrize("is_stable", [False, True])
def test_orders_by_numpys_shuffle(mm, tmp_path, is_stable):
    """One generator draws both orders; with stable_order each epoch has one of its own."""
    for rng in cases(60):
        fields = random_orders(rng) | {"stable_order": is_stable}
        prefix = mk(mm, tmp_path / "p", random_docs(rng))
        documents = rng.permutation(len(mm.IndexedDataset(prefix)))
        ds = gpt(mm, prefix, rng.integers(200), "valid", documents, **fields)
        S = fields["sequence_length"]
        extra = fields["add_extra_token_to_sequence"]
        drop_last = fields["drop_last_partial_validation_sequence"]
        tokens = int(ds.dataset.sequence_lengths[ds.indices].sum())
        plan = mm.plan_epochs(tokens, ds.num_samples, S, drop_last, extra)
        epochs = epochs_of_samples(plan, tokens, S, int(extra))
        document_index, shuffle_index = orders_by_hand(ds, plan, epochs)
        same(ds.document_index, document_index)
        same(ds.shuffle_index, shuffle_index)
        assert len(ds) == len(shuffle_index) >= ds.num_samples


@pytest.mark.parametrize("keeps_short", [False, True])
def test_a_longer_stable_dataset_begins_with_the_shorter_one(mm, tmp_path, keeps_short):
    """For any two sizes; where a short sample is kept, up to the last epoch of the shorter one."""
    for rng in cases(25):
        fields = random_orders(rng) | {"stable_order": True}
        fields["drop_last_partial_validation_sequence"] = not keeps_short
        prefix = mk(mm, tmp_path / "p", random_docs(rng, most=8, longest=12))
        most = 6 * len(gpt(mm, prefix, None, "valid", **fields)) + 6
        longest = gpt(mm, prefix, most, "valid", **fields)
        for size in [None, 0, *rng.integers(1, most, 3).tolist()]:
            shorter = gpt(mm, prefix, size, "valid", **fields)
            n = len(shorter)
            if keeps_short:
                n = shorter.epoch_plan.samples_before_final_epoch
            same(shorter.document_index, longest.document_index[: len(shorter.document_index)])
            same(shorter.sample_index[: n + 1], longest.sample_index[: n + 1])
            same(shorter.shuffle_index[:n], longest.shuffle_index[:n])


def test_upstreams_order_depends_on_the_number_of_samples(mm, up, tmp_path):
    """README's numbers: two samples more, and 3 of the first 200 stay where they were."""
    prefix = mk(mm, tmp_path / "p", [[2 + d] * 9 for d in range(200)])
    for names, fields, wanted in [(up, {}, 3), (mm, {}, 3), (mm, {"stable_order": True}, 200)]:
        before, after = [gpt(names, prefix, size, **fields) for size in (224, 226)]
        equal = 0
        for k in range(200):
            equal += torch.equal(before[k]["tokens"], after[k]["tokens"])
        assert equal == wanted


def test_document_numbers_beyond_int32_are_refused(mm):
    """They must not wrap."""
    documents = np.array([1, 2**31])
    with pytest.raises(ValueError, match=f"document {2**31}"):
        mm.build_document_index(documents, 1, np.random.RandomState(0), False)
    with pytest.raises(ValueError, match=f"document {2**31}"):
        mm.build_stable_orders(documents, [0, 1], 1234)


# ==============================================================================
# 5. GPTDataset
# ==============================================================================
# The toy corpus by hand stands in front of section 1; the three orders are tested in section 4.

INTEGERS = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16]  # dtypes of token ids
QUERY = "_query_document_sample_shuffle_indices"  # upstream's name, for subclasses


def arrays(ds):
    """Copies of the three arrays of a GPTDataset."""
    return [np.array(ds.document_index), np.array(ds.sample_index), np.array(ds.shuffle_index)]


def same_arrays(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        same(a, b)


def file_of(folder, ending):
    """The one file of a folder whose name ends so."""
    [path] = [path for path in pathlib.Path(folder).iterdir() if path.name.endswith(ending)]
    return path


def read_in_all_ways(ds, indices):
    """Lists of these samples: read one by one, several at once, and cut out of a batch."""
    batch = ds.batch(indices)
    rows = []
    for row in range(len(indices)):
        rows.append({key: column[row] for key, column in batch.items()})
    return [ds[k] for k in indices], ds.__getitems__(indices), rows


def ways_to_read(ds, k):
    """Sample k alone, among several, and in a batch: [(method, argument), ...]."""
    return [(ds.__getitem__, k), (ds.__getitems__, [0, k]), (ds.batch, [k])]


def check_refused(ds, k, error, words=None):
    """Sample k cannot be read in any way."""
    for read, argument in ways_to_read(ds, k):
        with pytest.raises(error, match=words):
            read(argument)


# -- a batch is a table, and a sample is a row of it -----------------------------------------------


@pytest.fixture
def toy_datasets(mm, toy):
    """A GPTDataset and a BlendedDataset of three samples each."""
    ds = gpt(mm, toy, 3, sequence_length=4)
    return [ds, mm.BlendedDataset([ds, ds], [1, 2], 3, ds.config)]


def test_samples_are_written_into_the_rows_that_are_asked_for(toy_datasets):
    """And into no other row."""
    for data in toy_datasets:
        table = data.columns(3)
        for values in table.values():
            values.fill(77)
        data.fill(table, [2, 0], [1, 2])
        for key, values in table.items():
            same(values[2], data[1][key])
            same(values[0], data[2][key])
            assert (values[1] == 77).all()


def test_indices_are_whole_numbers_of_samples_that_exist(toy_datasets):
    for data in toy_datasets:
        for k in (1.0, "1", [1]):
            check_refused(data, k, TypeError)
        for k in (3, -4, 2**32, 2**63, -(2**63) - 1):
            check_refused(data, k, IndexError, f"index {k} ")
        for k in (np.int64(1), torch.tensor(1), True):
            same_samples(data[k], data[1])
        for indices in (np.array([0, 1]), torch.tensor([0, 1]), (0, 1), range(2)):
            same_samples(data.batch(indices), data.batch([0, 1]))
        assert data.__getitems__([]) == []


def check_memory_is_not_shared(samples, others):
    """What is written into a tensor of one of these samples is in no other one, nor in others."""
    values = list(others)
    for sample in samples:
        values += [tensor.numpy() for tensor in sample.values()]
    for a, b in itertools.combinations(values, 2):
        assert not np.shares_memory(a, b)


@pytest.mark.parametrize("flag", ["create_attention_mask", "inter_document_masking"])
def test_no_two_samples_share_memory(mm, tmp_path, flag):
    """Nor does one with the corpus, though int64 tokens could be views of it.

    Upstream: masks are shared, and padding stays in them.
    """
    prefix = mk(mm, tmp_path / "p", [np.arange(90)], np.int64)
    ds = gpt(mm, prefix, **{flag: True})
    for data in (ds, mm.BlendedDataset([ds, ds], [1, 1], 6, ds.config)):
        one_by_one, several, _ = read_in_all_ways(data, [0, 1, 0, None])
        samples = [*one_by_one, *several, data.batch([0, 1])]
        check_memory_is_not_shared(samples, [ds.dataset[0], ds.shuffle_index])


# -- datasets of the user's own --------------------------------------------------------------------


def numbers_class(mm):
    """A dataset of the user's own: sample k is the number of its element."""

    class Numbers(mm.MegatronDataset):
        def __len__(self):
            return len(self.indices)

        def __getitem__(self, idx):
            return {"number": self.dataset[self.indices[0 if idx is None else idx]]}

    return Numbers


def test_the_builder_cuts_and_blends_datasets_of_the_users_own(one):
    class Built(numbers_class(one)):
        @staticmethod
        def build_low_level_dataset(dataset_path, config):
            return range(10, 20) if dataset_path == "ten" else range(20)

        @staticmethod
        def numel_low_level_dataset(opened):
            return len(opened)

    cfg = config(one, (["ten"], None), split="5,5,0")
    train, valid, test = build(one, [3, 3, 0], cfg, Built)
    assert len(train) == 5
    assert test is None
    assert valid.__getitems__([4, 0]) == [{"number": 19}, {"number": 15}]
    assert valid.batch([4, 0])["number"].tolist() == [19, 15]

    cfg = config(one, (["ten", "zero"], [1, 1]), split="5,5,0")
    train, valid, _ = build(one, [4, 4, 0], cfg, Built)
    places = [(sample["dataset_id"], sample["number"]) for sample in train]
    assert places == [(0, 10), (1, 0), (0, 11), (1, 1)]
    assert valid.batch([0, 1])["number"].tolist() == [15, 10]


def test_a_dataset_that_is_made_by_hand_needs_samples_alone(one):
    """As in upstream: only the builder asks for the two static methods."""
    cls = numbers_class(one)
    cfg = config(one, (["ten"], None), tokenizer=Tok(pad=7))
    without_tokenizer = one.BlendedMegatronDatasetConfig(1, 8, blend=(["ten"], None), split="1")
    for any_config, pad in ((cfg, 7), (without_tokenizer, -1)):
        ds = cls(range(30, 40), None, [2, 3], None, one.Split.train, any_config)
        assert [ds[k] for k in range(2)] == [{"number": 32}, {"number": 33}]
        assert ds._pad_token_id == pad
    with pytest.raises(NotImplementedError, match="build_low_level_dataset"):
        build(one, [3, 3, 0], cfg, cls)
    with pytest.raises(NotImplementedError, match="numel_low_level_dataset"):
        cls.numel_low_level_dataset([])


@linux
@pytest.mark.parametrize("is_mapped", [True, False])
def test_mmap_bin_files_says_whether_tokens_are_mapped(one, pair, is_mapped):
    cfg = config(one, ([pair], None), mmap_bin_files=is_mapped)
    opened = one.GPTDataset.build_low_level_dataset(pair, cfg)
    assert (f"{pair}.bin" in pathlib.Path("/proc/self/maps").read_text()) == is_mapped
    assert len(opened) == len(PAIR)


# -- samples by loops ------------------------------------------------------------------------------


def latest(starts, at):
    """The last of these places up to this one."""
    return max(start for start in starts if start <= at)


def brute_text(ds, whole, k):
    """The S inputs of sample k and the label of the last, where they are there.

    whole   all tokens of the dataset, end to end
    """
    S = ds.config.sequence_length
    begin = int(ds.shuffle_index[k]) * S
    return whole[begin : begin + S + int(ds.config.add_extra_token_to_sequence)]


def brute_sample(ds, whole, k):
    """Sample k of a GPTDataset from its whole stream of tokens, by loops; its keys are in order."""
    cfg = ds.config
    S = cfg.sequence_length
    eod = cfg.tokenizer.eod
    pad = cfg.tokenizer.pad
    text = brute_text(ds, whole, k).tolist()
    text += [pad] * (S + 1 - len(text))
    tokens = text[:-1]
    labels = text[1:]

    # which document of the stream a token is from; padding belongs to the last one
    begin = int(ds.shuffle_index[k]) * S
    lengths = ds.dataset.sequence_lengths[ds.document_index]
    owners = np.repeat(np.arange(len(lengths)), lengths)[begin : begin + S].tolist()
    owners += owners[-1:] * (S - len(owners))

    of_pieces = [at for at in range(S) if at == 0 or owners[at - 1] != owners[at]]
    after_eod = [at for at in range(S) if at == 0 or tokens[at - 1] == eod]
    mask_starts = after_eod if cfg.reset_attention_mask else [0]
    position_starts = after_eod if cfg.reset_position_ids else [0]
    if cfg.inter_document_masking:
        position_starts = of_pieces

    sample = {
        "tokens": [0 if token == pad else token for token in tokens],
        "labels": [0 if label == pad else label for label in labels],
    }
    if cfg.create_attention_mask and not cfg.inter_document_masking:
        rows = []
        for i in range(S):
            rows.append([not latest(mask_starts, i) <= j <= i for j in range(S)])
        sample["attention_mask"] = [rows]
    sample["loss_mask"] = []
    for at in range(S):
        is_masked = labels[at] == pad or (cfg.eod_mask_loss and tokens[at] == eod)
        sample["loss_mask"].append(0.0 if is_masked else 1.0)
    sample["position_ids"] = [at - latest(position_starts, at) for at in range(S)]
    sample = {key: torch.tensor(values) for key, values in sample.items()}
    if cfg.inter_document_masking:
        cu_seqlens = of_pieces + [S] * (S + 1 - len(of_pieces))
        sample["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32)
        sample["max_seqlen"] = sample["cu_seqlens"].diff().max()
    return sample


def random_parity_flags(rng):
    """All fields of a config that change a sample, as far as upstream has them."""
    flags = random_orders(rng)
    for name in ("reset_position_ids", "eod_mask_loss", "create_attention_mask"):
        flags[name] = bool(rng.integers(2))
    flags["reset_attention_mask"] = flags["create_attention_mask"] and bool(rng.integers(2))
    return flags


def random_flags(rng):
    """All fields of a config that change a sample; eod and pad are tokens of the corpus or none."""
    packs = bool(rng.random() < 0.3)
    flags = random_parity_flags(rng) | {
        "tokenizer": Tok(rng.choice([0, 0, 0, None]), pad=int(rng.choice([-1, 4]))),
        "inter_document_masking": packs,
        "stable_order": bool(rng.integers(2)),
    }
    flags["reset_attention_mask"] &= not packs
    return flags


def random_dataset(mm, rng, prefix, dtype):
    """A GPTDataset of random documents, of which some end in eod (0), of one or more epochs."""
    docs = []
    for doc in random_docs(rng, vocab=5):
        docs.append(np.append(doc, 0) if rng.random() < 0.7 else doc)
        if rng.random() < 0.2:
            docs.append(doc[:0])
    documents = np.arange(len(docs), dtype=np.int32)
    if rng.random() < 0.3:
        documents = rng.permutation(documents)[: rng.integers(1, len(docs) + 1)]
    n = None if rng.random() < 0.3 else int(rng.integers(1, 40))
    if sum(len(docs[i]) for i in documents) < 3:
        n = None
    split = str(rng.choice(["train", "valid"]))
    return gpt(mm, mk(mm, prefix, docs, dtype), n, split, documents, **random_flags(rng))


def check_pieces(ds, whole, k):
    """They hold the text of sample k; upstream's method returns it, padded, and the sequences."""
    pieces = ds.pieces(k)
    wanted = brute_text(ds, whole, k)
    found = np.concatenate([ds.dataset.get(*piece) for piece in pieces])
    same(found.astype(np.int64), wanted)
    tokens, sequences = getattr(ds, QUERY)(k)
    room = ds.config.sequence_length + int(ds.config.add_extra_token_to_sequence)
    padding = np.full(room - len(wanted), ds.config.tokenizer.pad)
    same(tokens, np.concatenate([wanted, padding]))
    same(sequences, np.array([sequence for sequence, _, _ in pieces]))


@pytest.mark.filterwarnings("ignore")
def test_samples_equal_the_loops(mm, tmp_path):
    """Under every flag, from every dtype, mapped or not; None is sample 0 without any loss."""
    for case, rng in enumerate(cases(40)):
        ds = random_dataset(mm, rng, tmp_path / f"{case}/p", INTEGERS[case % len(INTEGERS)])
        if len(ds) == 0:
            continue
        whole = stream(ds)
        some = [-1, 0, *rng.integers(len(ds), size=20).tolist()]
        for k in some:
            check_pieces(ds, whole, k)
        wanted = {k: brute_sample(ds, whole, k) for k in some}
        wanted[None] = wanted[0] | {"loss_mask": torch.zeros(ds.config.sequence_length)}
        for mmap in (True, False):
            ds.dataset = mm.IndexedDataset(ds.dataset_path, mmap=mmap)
            for samples in read_in_all_ways(ds, list(wanted)):
                for k, sample in zip(wanted, samples, strict=True):
                    same_samples(sample, wanted[k], (case, k, mmap, ds.config))


# -- padding, and resets that find nothing ---------------------------------------------------------


class NoEod:
    """A tokenizer that has a pad, and answers other questions as upstream's base class does."""

    pad = 7
    unique_identifiers = {}

    @property
    def eod(self):
        raise NotImplementedError

    eos = special_tokens_dict = eod


PADS = {  # a tokenizer, the pad id that counts, and the one where it may be ambiguous
    "there is none": (Tok(), -1, -1),
    "there is no other special token": (NoEod(), 7, 7),
    "it is no other special token": (Tok(pad=7), 7, 7),
    "it is eod": (Tok(pad=0), -1, 0),
    "it equals a large eos": (Tok(pad=int("50256"), eos=int("50256")), -1, 50256),
    "it is eod, which is not in the dict": (Tok(pad=0, special_tokens_dict={"bos": 9}), 0, 0),
    "it is in the dict": (Tok(pad=9, special_tokens_dict={"bos": 9}), -1, 9),
    "the dict names it pad_token": (Tok(pad=9, special_tokens_dict={"pad_token": 9}), 9, 9),
    "the dict is empty": (Tok(pad=0, special_tokens_dict={}), -1, 0),
}


PADS_OF_TOK = [case for case in PADS if isinstance(PADS[case][0], Tok)]  # upstream takes these


@pytest.mark.parametrize("case", PADS)
def test_pad_id(one, pair, case):
    """A pad that is also another special token is not used, with a warning."""
    tokenizer, pad, if_allowed = PADS[case]
    for allowed, wanted in ((False, pad), (True, if_allowed)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ds = gpt(one, pair, tokenizer=tokenizer, allow_ambiguous_pad_tokens=allowed)
        assert ds._pad_token_id == wanted  # upstream's name, too
        warned = ["pad id" in str(warning.message) for warning in caught]
        assert warned == ([] if wanted == if_allowed else [True])


@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
@pytest.mark.parametrize("last_token, num_warnings", [(3, 1), (0, 0)])
def test_resets_without_eod_in_the_corpus_warn(mm, tmp_path, flag, last_token, num_warnings):
    prefix = mk(mm, tmp_path / "p", [[1, 2, last_token]] * 9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpt(mm, prefix, 1, create_attention_mask=True, **{flag: True})
    assert ["--append-eod" in str(w.message) for w in caught] == [True] * num_warnings


# -- what is refused -------------------------------------------------------------------------------


BAD_DATASETS = {  # documents of 9 tokens, their dtype, those of the dataset, the error, a word
    "a document too many": ([[1] * 9] * 3, np.int32, [0, 3], IndexError, "0 .. 3 of 3"),
    "a document below 0": ([[1] * 9] * 3, np.int32, [-1, 0], IndexError, "-1 .. 0 of 3"),
    "tokens that are no integers": ([[1] * 9] * 3, np.float32, [0], ValueError, "float32"),
    "no documents": ([[1] * 9] * 3, np.int32, [], ValueError, "train of split '1,0,0'"),
    "empty documents": ([[]] * 3, np.int32, [0, 1, 2], ValueError, "no tokens"),
}


@pytest.mark.parametrize("case", BAD_DATASETS)
def test_datasets_that_cannot_be(mm, tmp_path, case):
    """Upstream never returns where there are no tokens for the samples that are wanted."""
    docs, dtype, documents, error, words = BAD_DATASETS[case]
    prefix = mk(mm, tmp_path / "p", docs, dtype)
    with pytest.raises(error, match=words):
        gpt(mm, prefix, 1, documents=np.array(documents, np.int32))


@pytest.mark.parametrize("documents", [[0], []])
def test_one_epoch_may_have_no_samples(mm, tmp_path, documents):
    """The only document has 8 tokens, and a sample is 8 tokens and a label."""
    prefix = mk(mm, tmp_path / "p", [[1] * 8])
    assert len(gpt(mm, prefix, documents=np.array(documents, np.int32))) == 0


def test_valid_alone_may_keep_a_short_sample(one, tmp_path):
    """Twelve tokens are a sample of 8 and a label, and a short one."""
    prefix = mk(one, tmp_path / "p", [np.arange(12)])
    lengths = {}
    for split in ("train", "valid", "test"):
        ds = gpt(one, prefix, None, split, drop_last_partial_validation_sequence=False)
        lengths[split] = len(ds)
    assert lengths == {"train": 1, "valid": 2, "test": 1}


# Sample 1 of the stream is between rows 1 and 2 of sample_index, (1, 0) and (2, 1): b b b c c.
DAMAGED_ARRAYS = [  # array, place, value, extra token
    ("sample_index", (1, 0), 3, True),
    ("sample_index", (1, 0), -1, True),
    ("sample_index", (1, 1), -1, True),
    ("sample_index", (1, 1), 99, True),
    ("sample_index", (2, 0), 0, True),
    ("sample_index", (2, 0), 3, True),
    ("sample_index", (2, 1), 5, True),
    ("sample_index", (2, 1), 2, False),  # S is 4, and a kernel has room for the fifth token
    ("document_index", 1, 3, True),
    ("document_index", 1, -1, True),
    ("shuffle_index", 0, 3, True),
    ("shuffle_index", 0, 2**32 - 1, True),
]


@pytest.mark.parametrize("name, place, value, extra", DAMAGED_ARRAYS)
def test_arrays_of_other_data_that_are_set(mm, toy, name, place, value, extra):
    """The error comes where a sample meets the place that does not fit."""
    ds = gpt(mm, toy, 3, sequence_length=4, add_extra_token_to_sequence=extra)
    k = place if name == "shuffle_index" else ds.shuffle_index.tolist().index(1)
    values = np.array(getattr(ds, name))
    values[place] = value
    setattr(ds, name, values)
    check_refused(ds, k, IndexError, re.escape(toy))


def test_a_damaged_idx_is_found_by_a_build(mm, toy):
    """The length of its second sequence is another; opening the pair does not look at it."""
    patch(f"{toy}.idx", 34 + 4, b"\x09")
    with pytest.raises(mm.DatasetFormatError, match=re.escape(toy)):
        gpt(mm, toy, 3, sequence_length=4)


# -- arrays that are set, and subclasses -----------------------------------------------------------


def test_arrays_may_be_set(mm, tmp_path):
    """They count from then on, in batches, in blends and in a pickle; the cache keeps its own."""
    prefix = mk(mm, tmp_path / "p", [np.arange(90)] * 3)
    plain = gpt(mm, prefix)
    before = files_of(tmp_path)
    ds = gpt(mm, prefix)
    last = len(plain) - 1
    ds.shuffle_index = np.array(plain.shuffle_index[::-1])
    for _ in range(2):
        same_samples(ds[0], plain[last])
        same(ds.batch([0, 1])["tokens"], plain.batch([last, last - 1])["tokens"])
        same(ds.document_index, plain.document_index)
        ds = pickle.loads(pickle.dumps(ds))
    ds.document_index = np.zeros_like(plain.document_index)
    ds.sample_index = plain.sample_index[:3]
    assert (len(ds), ds.document_index.tolist()) == (2, [0, 0, 0])
    assert files_of(tmp_path) == before

    blend = mm.BlendedDataset([plain, plain], [1, 1], 4, plain.config)
    blend.dataset_index = np.array([1, 1, 0, 0], np.int16)
    blend.dataset_sample_index = np.array([3, 2, 1, 0])
    same(blend.batch([0, 3])["dataset_id"], np.array([1, 0]))
    same(blend.batch([0, 3])["tokens"], plain.batch([3, 0])["tokens"])
    plain.shuffle_index = np.array([-1])
    check_refused(plain, 0, IndexError, "rebuild")


def with_class(cls, ds):
    """A GPTDataset again, of another class."""
    return cls(ds.dataset, ds.dataset_path, ds.indices, ds.num_samples, ds.index_split, ds.config)


def test_a_subclass_may_have_orders_of_its_own(mm, tmp_path):
    """It is asked each time, and what it returns is not put into the cache."""

    class InOrder(mm.GPTDataset):
        def _build_document_sample_shuffle_indices(self):
            documents, samples, order = super()._build_document_sample_shuffle_indices()
            return documents, samples, np.sort(order)

    prefix = mk(mm, tmp_path / "p", [np.arange(100), np.arange(50), np.arange(200, 214)])
    folder = tmp_path / "cache"
    plain = gpt(mm, prefix, path_to_cache=str(folder))
    for _ in range(2):
        ds = with_class(InOrder, plain)
        same(ds[1]["tokens"], stream(plain)[8:16])
        same(ds.batch([1, 0])["labels"][0], stream(plain)[9:17])
    same(np.load(file_of(folder, "-InOrder-train-shuffle_index.npy")), plain.shuffle_index)


def subclass_of(mm, name, method):
    """A subclass of GPTDataset with this method."""
    return type("Own", (mm.GPTDataset,), {name: method})


# Methods of subclasses: k, k + 1, ... are the tokens of sample k.


def own_sample(self, k):
    return {"tokens": torch.arange(k, k + 8)}


def own_tokens(self, k):
    return np.arange(k, k + 9), np.array([0])


def own_tokens_and_more(self, k):
    """Upstream's newest class returns a third value."""
    return np.arange(k, k + 9), np.array([0]), np.array([9])


def own_more(self, k):
    """A class that adds to samples, which are ours, and its tokens."""
    return super(type(self), self).__getitem__(k) | own_sample(self, k)


@pytest.mark.parametrize(
    "name, method",
    [
        ("__getitem__", own_sample),
        ("__getitem__", own_more),
        (QUERY, own_tokens),
        (QUERY, own_tokens_and_more),
    ],
)
def test_a_subclass_keeps_its_own_method(mm, tmp_path, name, method):
    """Alone, in a batch, in a blend with a dataset that C reads, and in a batch of that blend."""
    plain = gpt(mm, mk(mm, tmp_path / "p", [np.arange(90)] * 3))
    own = with_class(subclass_of(mm, name, method), plain)
    wanted = [torch.arange(k, k + 8) for k in range(5)]
    assert not torch.equal(plain[1]["tokens"], wanted[1])
    assert (plain.fills_rows, own.fills_rows) == (True, False)
    # the other part of the blend has to have the same keys
    others = [own, own] if name == "__getitem__" else [own, plain]
    blend = mm.BlendedDataset(others, [1, 1], 10, plain.config)  # samples 0, 2, ... are own ones
    of_own = read_in_all_ways(own, range(5))
    of_blend = [samples[::2] for samples in read_in_all_ways(blend, range(10))]
    for samples in [*of_own, *of_blend]:
        for sample, values in zip(samples, wanted, strict=True):
            same(sample["tokens"], values)


def test_tokens_of_a_subclass_are_filled_up(mm, tmp_path):
    """Where there are fewer than S + 1 of them; where there are more, it is an error.

    Whoever writes into a sample, such as -100 into its labels, changes nothing else.
    """
    plain = gpt(mm, mk(mm, tmp_path / "p", [np.arange(90)]), tokenizer=Tok(pad=7))
    read = np.arange(10)

    def so_many_tokens(self, k):
        return read[:k], []

    own = with_class(subclass_of(mm, QUERY, so_many_tokens), plain)
    for tensor in own[9].values():
        tensor.zero_()
    same(read, np.arange(10))
    same(own[5]["tokens"], np.array([0, 1, 2, 3, 4, 0, 0, 0]))
    same(own[5]["loss_mask"], np.array([1, 1, 1, 1, 0, 0, 0, 0], np.float32))
    check_refused(own, 10, IndexError, "wanted 9 .* got 10")


# -- mock data -------------------------------------------------------------------------------------


def test_mock_data_count_up_to_an_eod(mm):
    """Their lengths are upstream's, and no blend means mock data, cut into three equal parts."""
    lengths = np.random.default_rng(0).integers(1, 4096, size=100_000, dtype=np.int32)
    cfg = config(mm, sequence_length=4096, tokenizer=Tok(eod=5))
    built = build(mm, [3, 2, 1], cfg, mm.MockGPTDataset)
    for ds, first, end in zip(built, (0, 33_333, 66_667), (33_333, 66_667, 100_000), strict=True):
        same(ds.dataset.sequence_lengths, lengths)
        same(ds.indices, np.arange(first, end, dtype=np.int32))
        i, offset, length = ds.pieces(0)[0]
        sequence = [number % 1000 for number in range(1, lengths[i])] + [5]
        assert ds.dataset[i].tolist() == ds.dataset.get(i).tolist() == sequence
        assert ds[0]["tokens"][:length].tolist() == sequence[offset : offset + length]


# ==============================================================================
# 6. BlendedDataset
# ==============================================================================


def blend_by_a_loop(weights, size, most=None):
    """[(dataset, its sample), ...]: always of the first dataset with the largest lag.

    most   how many samples each dataset has; None: no end of them
    """
    most = [math.inf] * len(weights) if most is None else most
    taken = [0] * len(weights)
    pairs = []
    for i in range(size):
        lags = []
        for weight, count, end in zip(weights, taken, most, strict=True):
            lags.append(weight * max(i, 1) - count if count < end else -math.inf)
        d = lags.index(max(lags))
        pairs.append((d, taken[d]))
        taken[d] += 1
    return pairs


def check_blends(mm):
    """Of weights with ties, near ties and tiny ones; the arrays may be long, or have gaps."""
    for rng in cases(60):
        n = int(rng.choice([rng.integers(1, 40), rng.integers(33, 300)]))  # C has loops for both
        shapes = [rng.random(n), rng.integers(1, 4, n), rng.dirichlet(np.full(n, 0.2)), np.ones(n)]
        weights = shapes[rng.integers(4)] + 1e-9
        if rng.random() < 0.7:
            weights = weights / weights.sum()
        size = int(rng.integers(0, 1000 if n < 33 else 300))
        sizes = rng.integers(0, 2 + 300 // n, n)
        total = int(sizes.sum())
        shares = sizes / max(total, 1)
        of_weights = blend_by_a_loop(weights.tolist(), size)
        of_sizes = blend_by_a_loop(shares.tolist(), total, sizes.tolist())
        for function, inputs, wanted in (
            (mm.build_blending_indices, (weights, n, size), of_weights),
            (mm.build_exhaustive_blending_indices, (sizes, n), of_sizes),
        ):
            step = int(rng.choice([1, 1, 2, -1]))
            places = 2 * len(wanted) + int(rng.choice([0, 9]))
            outputs = np.full(places, 77, np.int16)[::step], np.full(places, 77)[::step]
            function(*outputs, *inputs)
            found = list(zip(*lists(outputs), strict=True))
            assert found == wanted + [(77, 77)] * (len(found) - len(wanted)), inputs


def test_an_empty_dataset_gives_nothing_to_an_exhaustive_blend(mm):
    which, sample = np.zeros(4, np.int16), np.zeros(4, np.int64)
    mm.build_exhaustive_blending_indices(which, sample, [0, 4], 2)
    assert (which.tolist(), sample.tolist()) == ([1] * 4, [0, 1, 2, 3])


def test_blends_by_a_loop(mm):
    check_blends(mm)


def test_blend_of_as_many_datasets_as_int16_can_number(mm):
    """Upstream has arrays of so many doubles on its stack."""
    which, sample = np.zeros(50, np.int16), np.zeros(50, np.int64)
    mm.build_blending_indices(which, sample, np.full(32766, 1 / 32766), 32766, 50)
    assert which.tolist() == list(range(50))
    for n in (32767, 32768):
        with pytest.raises(ValueError, match="32766"):
            mm.build_blending_indices(which, sample, np.full(n, 1 / n), n, 5)


# -- phases ----------------------------------------------------------------------------------------


def blended(mm, sizes, weights, size, phases=None, **fields):
    """A blend of datasets of so many samples, which need no kernel."""
    cfg = config(mm, (["x"], None), **fields)
    datasets = [Bare(n, mm.Split.train) for n in sizes]
    return mm.BlendedDataset(datasets, weights, size, cfg, phases)


def in_phases(mm, sizes, phases, **fields):
    """A blend in phases of datasets that have so many samples."""
    return blended(mm, sizes, None, None, phases, **fields)


def phases_by_hand(ds):
    """[(dataset, its sample), ...]: in each phase a blend of those with a weight, numbered on."""
    phases = ds.phases
    if phases is None:
        phases = [(ds.size, ds.weights)]
    pairs = []
    taken = [0] * len(phases[0][1])  # before this phase
    for samples, weights in phases:
        used = [d for d, weight in enumerate(weights) if weight > 0]
        before = list(taken)
        for place, k in blend_by_a_loop([weights[d] for d in used], samples):
            d = used[place]
            pairs.append((d, before[d] + k))
            taken[d] += 1
    return pairs


def pairs_of(ds):
    return list(zip(ds.dataset_index.tolist(), ds.dataset_sample_index.tolist(), strict=True))


def random_phases(rng, num_datasets):
    """Up to five phases, in which some datasets have no weight."""
    phases = []
    for _ in range(rng.integers(1, 6)):
        weights = rng.integers(0, 6, num_datasets) * rng.choice([1, 0.3])
        weights[rng.integers(num_datasets)] += 1
        phases.append((int(rng.integers(1, 40)), weights.tolist()))
    return phases


def test_phases_by_hand(mm):
    """The drawing at the top of the section, and a phase in which a dataset rests."""
    ds = in_phases(mm, [9, 9], [(4, [1, 3]), (4, [1, 1]), (2, [0, 5])])
    same(ds.dataset_index, np.array([1, 0, 1, 1, 0, 1, 0, 1, 1, 1], np.int16))
    same(ds.dataset_sample_index, np.array([0, 0, 1, 2, 1, 3, 2, 4, 5, 6]))
    assert ds.phases == [(4, [0.25, 0.75]), (4, [0.5, 0.5]), (2, [0.0, 1.0])]
    assert len(ds) == ds.size == 10
    assert ds.weights is None
    assert ds[9] == {"dataset_id": 1, "sample": 6}
    alone = in_phases(mm, [9, 9], [(3, [0, 1])])
    assert pairs_of(alone) == [(1, 0), (1, 1), (1, 2)]


def test_phases_by_a_loop(mm):
    """A dataset without weight gives nothing, though its lag, 0, would often be the largest.

    One phase of all datasets is the plain blend.
    """
    for rng in cases(100):
        phases = random_phases(rng, int(rng.integers(1, 6)))
        sizes = [999] * len(phases[0][1])
        ds = in_phases(mm, sizes, phases)
        assert pairs_of(ds) == phases_by_hand(ds), phases
        samples, weights = phases[0]
        if all(weights):
            plain = blended(mm, sizes, weights, samples)
            one_phase = in_phases(mm, sizes, phases[:1])
            assert one_phase.unique_description == plain.unique_description
            assert one_phase.phases is None
            assert pairs_of(one_phase) == pairs_of(plain) == phases_by_hand(plain)


def test_phases_are_in_the_key(one, tmp_path):
    phases = [(4, [1, 3]), (4, [1, 1])]
    kinds = [phases, phases[:1], phases[::-1], [(5, [1, 3]), (3, [1, 1])], [(4, [1, 3])] * 2]
    kinds += [[(4, [0, 1])], [(4, [1, 0])], [(4, [0, 1]), (4, [1, 0])], [(8, [1, 3])]]
    for _ in range(2):  # the second time from the cache
        for kind in kinds:
            ds, messages = heard(in_phases, one, [9, 9], kind, path_to_cache=str(tmp_path))
            assert pairs_of(ds) == phases_by_hand(ds)
            assert messages == []
    assert len(os.listdir(tmp_path)) == 4 * len(kinds)


BAD_PHASES = {  # a word of the sentence: phases of two datasets
    "wanted": [[], 5],
    "phase 0": [[5], [(4.0, [1, 1])], [(4, [1])], [(4, [0, 0])]],
    "phase 1: wanted 1 sample": [[(4, [1, 1]), (0, [1, 1])]],
    "phase 1: weight of bare": [[(4, [1, 1]), (4, [1, -1])]],
}


def test_bad_phases(one):
    """In a config too.  They stand for weights and size."""
    for word, rows in BAD_PHASES.items():
        for phases in rows:
            with pytest.raises(ValueError, match=word):
                in_phases(one, [9, 9], phases)
            with pytest.raises(ValueError, match=word):
                config(one, (["p", "bare"], None), blend_phases=phases)
    for weights, size in (([1, 1], None), (None, 4)):
        with pytest.raises(ValueError, match="None"):
            blended(one, [9, 9], weights, size, phases=[(4, [1, 1])])


# -- weights and sizes -----------------------------------------------------------------------------


BLENDS_BY_HAND = [  # weights, size, which dataset, which of its samples
    ([0.25, 0.75], 4, [1, 0, 1, 1], [0, 0, 1, 2]),
    ([1, 3], 8, [1, 0, 1, 1, 0, 1, 1, 1], [0, 0, 1, 2, 1, 3, 4, 5]),
    ([1, 1], 5, [0, 1, 0, 1, 0], [0, 0, 1, 1, 2]),
    ([1, 1], 0, [], []),
    ([1, 3], None, [1, 0, 1, 1], [0, 0, 1, 2]),
    ([2.0, 2.0], None, [0, 1, 0, 1], [0, 0, 1, 1]),
    ([2**70, 2**71], 3, [1, 0, 1], [0, 0, 1]),
    ([1e307, 2e307], 3, [1, 0, 1], [0, 0, 1]),
    ([1e-310, 2e-310], 3, [1, 0, 1], [0, 0, 1]),
]


@pytest.mark.parametrize("weights, size, datasets, samples", BLENDS_BY_HAND)
def test_blend_by_hand(mm, weights, size, datasets, samples):
    """Without a size the weights are counts.  Upstream: counts that are floats are an error."""
    ds = blended(mm, [9, 9], weights, size)
    same(ds.dataset_index, np.array(datasets, np.int16))
    same(ds.dataset_sample_index, np.array(samples, np.int64))
    same(ds.samples_taken(), np.array([datasets.count(0), datasets.count(1)]))
    assert len(ds) == len(datasets)
    for i, (d, k) in enumerate(zip(datasets, samples, strict=True)):
        assert ds[i] == ds[i - len(ds)] == {"dataset_id": d, "sample": k}


def test_the_samples_of_a_long_blend_are_counted(mm):
    """Of more samples than are counted at a time; the weights make two in three even."""
    ds = blended(mm, [99_999] * 2, [1, 2], 30_000)
    same(ds.samples_taken(), np.array([10_000, 20_000]))


BAD_BLENDS = [  # weights of two datasets, size, a word of the sentence
    ([-1, 1], 4, "weight of bare"),
    ([1, math.nan], 4, "weight of bare"),
    ([10**400, 1], 4, "weight of bare"),
    (["x", 1], 4, "weight of bare"),
    ([0, 0], 4, "finite sum"),
    ([1e308, 1.7e308], 4, "finite sum"),
    ([1], 4, "1 weights for 2"),
    ([1.5, 2.5], None, "numbers of samples"),
    ([1, 1], -1, "size"),
    ([1, 1], 4.7, "size"),
]


def test_refused_weights_and_sizes(one):
    for weights, size, word in BAD_BLENDS:
        with pytest.raises(ValueError, match=word):
            blended(one, [9, 9], weights, size)


def test_weight_0_drops_the_dataset(one, caplog):
    """With a note; the others are numbered without it."""
    ds = blended(one, [9, 8, 7], [0.0, 1, 1], 4)
    assert [len(dataset) for dataset in ds.datasets] == [8, 7]
    assert ds.dataset_index.tolist() == [0, 1, 0, 1]
    [note] = caplog.messages
    assert "weight 0: bare" in note
    blended(one, [9, 9], [1, 1], 4)
    assert len(caplog.messages) == 1


DEMANDS = [  # sizes of datasets, weights, size, (samples taken, samples there are) of which
    ([9, 4], [1, 1], 10, [(5, 4)]),
    ([2, 3], [1, 1], 10, [(5, 2), (5, 3)]),
    ([0, 2], [9, 3], None, [(9, 0), (3, 2)]),
]


@pytest.mark.parametrize("sizes, weights, size, wanted", DEMANDS)
def test_a_blend_that_asks_for_too_much(mm, tmp_path, sizes, weights, size, wanted):
    """New, and found in a cache.  Upstream: an IndexError in the run."""
    for _ in range(2):
        with pytest.raises(ValueError, match="bare") as error:
            blended(mm, sizes, weights, size, path_to_cache=str(tmp_path))
        found = re.findall(r"takes (\d+) .*? has (\d+)", str(error.value))
        assert [(int(taken), int(held)) for taken, held in found] == wanted


# -- samples and batches ---------------------------------------------------------------------------


@pytest.fixture
def three(mm, tmp_path):
    """Three corpora of one, two and eight bytes a token."""
    prefixes = []
    for k, dtype in enumerate([np.uint8, np.uint16, np.int64]):
        docs = random_docs(np.random.default_rng(k), vocab=5)
        prefixes.append(mk(mm, tmp_path / f"three{k}", docs, dtype))
    return prefixes


def check_samples_of_blend(ds, indices):
    """They are those of the datasets; None is sample 0 of dataset 0, without any loss."""
    wanted = []
    for i in indices:
        d = 0 if i is None else int(ds.dataset_index[i])
        k = None if i is None else int(ds.dataset_sample_index[i])
        wanted.append({"dataset_id": torch.tensor(d), **ds.datasets[d][k]})
        assert wanted[-1]["loss_mask"].any() == (i is not None)
    for samples in read_in_all_ways(ds, indices):
        for sample, expected in zip(samples, wanted, strict=True):
            same_samples(sample, expected)
    assert ds[indices[0]]["dataset_id"].dtype == torch.int64, "gloo sends no int16"


CONFIGS_OF_BLENDS = [  # fields of all datasets, of the blend, of its last dataset
    ({}, {}, {}),
    ({"create_attention_mask": True, "reset_attention_mask": True}, {}, {}),
    ({"inter_document_masking": True}, {}, {}),
    ({"reset_position_ids": True, "eod_mask_loss": True, "mmap_bin_files": False}, {}, {}),
    ({}, {"create_attention_mask": True}, {}),
    ({}, {"sequence_length": 5}, {}),
    ({}, {"sequence_length": 11}, {"eod_mask_loss": True, "random_seed": 5}),
]


@pytest.mark.parametrize("fields, of_blend, of_last", CONFIGS_OF_BLENDS)
def test_a_blend_has_the_samples_of_its_datasets(mm, three, fields, of_blend, of_last):
    """Each dataset makes its samples as its own config says, whatever that of the blend says."""
    ds = quiet(build, mm, [30, 0, 0], config(mm, (three, [1, 2, 3]), **fields))[0]
    if of_blend:
        parts = [*ds.datasets[:2], quiet(gpt, mm, three[2], 30, **of_last)]
        ds = mm.BlendedDataset(parts, [1, 2, 3], 30, config(mm, (three, None), **of_blend))
    check_samples_of_blend(ds, [7, 0, None, 29, 7, -1, 3, *range(12)])


def test_datasets_of_a_blend_may_have_other_keys(mm, toy):
    """A batch of samples of one of them has the keys of that one."""
    fields = {"n": 3, "sequence_length": 4}
    parts = [gpt(mm, toy, **fields), gpt(mm, toy, create_attention_mask=True, **fields)]
    blend = mm.BlendedDataset(parts, [1, 1], 6, parts[0].config)
    for d, part in enumerate(parts):
        batch = blend.batch([d, d + 2])  # datasets 0, 1, 0, 1
        wanted = part.batch([0, 1])
        same_samples(batch, {"dataset_id": torch.tensor([d, d]), **wanted})


def test_a_subclass_of_a_blend_keeps_its_own_method(mm, toy):
    """Batches too have what it adds to samples."""

    class More(mm.BlendedDataset):
        def __getitem__(self, i):
            return super().__getitem__(i) | {"more": torch.tensor(i)}

    ds = gpt(mm, toy, 3, sequence_length=4)
    blend = More([ds, ds], [1, 1], 4, ds.config)
    for samples in read_in_all_ways(blend, [2, 0]):
        assert [int(sample["more"]) for sample in samples] == [2, 0]


# ==============================================================================
# 7. The builder
# ==============================================================================
# What several ranks do is tested in section 15.

A = "in/a"
B = "in/b"
C = "in/c"


@pytest.fixture
def corpora(one, tmp_path, monkeypatch):
    """A, B and C: pairs of 40, 25 and 10 documents, in the current folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(11)
    for prefix, count in ((A, 40), (B, 25), (C, 10)):
        mk(one, prefix, [rng.integers(1, 50, n) for n in rng.integers(5, 30, count)])
    return [A, B, C]


def outline(built):
    """What was built: of each corpus (split, first document, end, samples wanted)."""
    if built is None:
        return None
    if hasattr(built, "datasets"):
        return [outline(dataset) for dataset in built.datasets]
    first = int(built.indices[0])
    end = first + len(built.indices)
    same(built.indices, np.arange(first, end, dtype=np.int32))
    return built.index_split.name, first, end, built.num_samples


# -- which datasets a config means -----------------------------------------------------------------


def test_a_corpus_is_cut_by_the_split(mm, corpora):
    built = build(mm, [100, 10, None], config(mm, ([A], None), split="8,1,1"))
    wanted = [("train", 0, 32, 100), ("valid", 32, 36, 10), ("test", 36, 40, None)]
    assert [outline(dataset) for dataset in built] == wanted
    assert built[0].dataset is built[2].dataset, "the corpus is opened once"


def test_each_corpus_of_a_blend_is_cut_by_the_split(mm, corpora):
    """Each is built for its share, rounded up, and a surplus; the blend has the shares alone."""
    train, valid, test = build(mm, [50, 20, 5], config(mm, ([A, B], [3, 2]), split="8,2,0"))
    assert outline(train) == [("train", 0, 32, 31), ("train", 0, 20, 21)]
    assert outline(valid) == [("valid", 32, 40, 13), ("valid", 20, 25, 9)]
    assert test is None
    rounded_up = build(mm, [7, 0, 0], config(mm, ([A, B], [1, 1])))[0]
    assert (len(train), len(valid), len(rounded_up)) == (50, 20, 8)
    same(train.samples_taken(), np.array([30, 20]))
    alone = build(mm, [50, 0, 0], config(mm, ([A], [7])))[0]  # its weight makes it a blend
    assert (outline(alone), len(alone)) == ([("train", 0, 40, 51)], 50)
    assert alone.batch([0, 1])["dataset_id"].tolist() == [0, 0]


def test_blends_of_the_splits_own_are_of_whole_corpora(mm, corpora):
    """One corpus is no blend, whatever its weight; none is opened whose weight is 0."""
    blends = [([A, "in/none", B], [1, 0.0, 3]), ([C], [7]), None]
    train, valid, test = build(mm, [40, 5, 5], config(mm, blend_per_split=blends))
    assert outline(train) == [("train", 0, 40, 11), ("train", 0, 25, 31)]
    assert (outline(valid), test) == (("valid", 0, 10, 5), None)


def test_a_note_of_the_corpora_of_weight_0(one, caplog):
    """One, however many splits drop them."""
    blend = ["a", "b", "c"], [1, 0, 2]
    for fields in ({"blend": blend, "split": "1,1,1"}, {"blend_per_split": [blend, None, blend]}):
        caplog.clear()
        given = config(one, **fields)
        one.BlendedMegatronDatasetBuilder(one.GPTDataset, [1, 1, 1], bool, given)
        [message] = caplog.messages
        assert message.endswith("weight 0: b")


def test_validation_sets(one, corpora):
    """Several ones are a list, a single one is none; other splits are blends."""
    fields = {"multiple_validation_sets": True}
    blend = ([A, C], None)
    sets = config(one, blend_per_split=[blend, blend, None], **fields)
    train, valid, _ = build(one, [None, 5, 0], sets)
    wanted = [("valid", 0, 40, 5), ("valid", 0, 10, 5)]
    assert [outline(dataset) for dataset in valid] == wanted
    assert outline(train) == [("train", 0, 40, None), ("train", 0, 10, None)]
    alone = config(one, blend_per_split=[None, ([A], None), None], **fields)
    assert outline(build(one, [0, 5, 0], alone)[1]) == wanted[0]


def test_a_blend_without_weights_is_one_epoch_of_each_corpus(mm, corpora):
    """All samples, or as many as are wanted; a corpus too short for a sample is left out."""
    short = mk(mm, "in/short", [[1, 2]])
    cfg = config(mm, ([A, short, B, C], None))
    whole = build(mm, [None, None, None], cfg)[0]
    assert [part.dataset_path for part in whole.datasets] == [A, B, C]
    lengths = [len(gpt(mm, prefix)) for prefix in (A, B, C)]
    assert np.bincount(whole.dataset_index).tolist() == lengths
    assert len(build(mm, [10, 0, 0], cfg)[0]) == 10
    _, messages = heard(build, mm, [sum(lengths), 0, 0], cfg)
    assert messages == []
    with pytest.warns(UserWarning, match=f"{sum(lengths)} samples, not 1,000,000"):
        large = build(mm, [1_000_000, 0, 0], cfg)[0]
    assert len(large) == sum(lengths)

    nothing = config(mm, ([short, short], None))
    for size in (None, 5):
        with pytest.raises(ValueError, match="train: .* no corpus"):
            build(mm, [size, 0, 0], nothing)
    assert build(mm, [0, 0, 0], nothing) == [None, None, None]


def test_a_corpus_that_would_be_exhausted_is_built_larger(mm, tmp_path):
    """And only that one.  Upstream: IndexError in the middle of a run.

    With a document of S tokens, a corpus has exactly as many samples as were asked for.
    """
    prefixes = [mk(mm, tmp_path / str(d), [[1] * 8]) for d in range(12)]
    larger = 0
    for rng in cases(10):
        weights = (rng.dirichlet(np.ones(int(rng.integers(2, 12)))) + 1e-3).tolist()
        size = int(rng.integers(50, 300))
        fields = {"mid_level_dataset_surplus": 0.0, "path_to_cache": str(tmp_path / "cache")}
        cfg = config(mm, (prefixes[: len(weights)], weights), **fields)
        for _ in range(2):  # the second time from the cache
            train = build(mm, [size, 0, 0], cfg)[0]
            taken = np.bincount(train.dataset_index, minlength=len(weights)).tolist()
            for d, part in enumerate(train.datasets):
                asked = math.ceil(size * train.weights[d])
                assert part.dataset_path == prefixes[d]
                assert part.num_samples == len(part) == max(asked, taken[d])
                larger += taken[d] > asked
            assert train.batch(range(len(train)))["tokens"].shape == (len(train), 8)
    assert larger, "no case needed it: the test shows nothing"


def test_another_class_gets_an_array_of_documents(one, corpora):
    """As upstream's builder gives it, to whatever __init__() such a class has."""

    class Even(one.GPTDataset):
        def __init__(self, opened, prefix, indices, *others):
            super().__init__(opened, prefix, indices[indices % 2 == 0], *others)

    ds = build(one, [None, None, None], config(one, ([A], None), split="1"), Even)[0]
    assert ds.indices.tolist() == list(range(0, 40, 2))


# -- phases ----------------------------------------------------------------------------------------


def test_each_corpus_lasts_for_all_phases(mm, tmp_path):
    """A document of S tokens: a corpus has exactly as many samples as it was built for."""
    prefixes = [mk(mm, tmp_path / name, [[1] * 8]) for name in "abc"]
    for rng in cases(20):
        phases = random_phases(rng, 3)
        fields = {"blend_phases": phases, "stable_order": True, "mid_level_dataset_surplus": 0.0}
        total = sum(samples for samples, _ in phases)
        size = [None, 0, total][rng.integers(3)]
        train = build(mm, [size, 0, 0], config(mm, (prefixes, None), **fields))[0]
        assert pairs_of(train) == phases_by_hand(train)
        for d, part in enumerate(train.datasets):
            asked = 0
            for samples, weights in phases:
                used = [weight for weight in weights if weight]
                asked += math.ceil(samples * (weights[d] / np.sum(used)))
            assert part.num_samples == len(part) == asked or asked == 0


@pytest.mark.parametrize("weights", [None, [0, 1, 1]])
def test_phases_are_for_train(mm, corpora, weights):
    """Valid and test are made as ever: by weights, or one epoch of each corpus."""
    phases = [(9, [1, 1, 0]), (6, [0, 1, 2])]
    cfg = config(mm, (corpora, weights), split="8,1,1", blend_phases=phases)
    train, valid, test = quiet(build, mm, [None, 5, 5], cfg)
    assert train.phases == [(9, [0.5, 0.5, 0.0]), (6, [0.0, 1 / 3, 2 / 3])]
    plain = quiet(build, mm, [15, 5, 5], config(mm, (corpora, weights), split="8,1,1"))
    for found, wanted in zip((valid, test), plain[1:], strict=True):
        assert found.unique_description == wanted.unique_description
        assert pairs_of(found) == pairs_of(wanted)


def test_phases_of_one_corpus_and_of_a_blend_of_trains_own(mm, corpora):
    """The latter have 15 samples: more than are asked for, but never less."""
    cfg = config(mm, (corpora[:1], None), split="8,1,1", blend_phases=[(9, [1]), (6, [1])])
    train, valid, test = build(mm, [15, 5, None], cfg)
    assert train.dataset_sample_index.tolist() == list(range(15))
    assert (outline(valid), outline(test)) == (("valid", 32, 36, 5), ("test", 36, 40, None))

    blends = [(corpora, [1, 1, 1]), (corpora[:2], [1, 1]), None]
    cfg = config(mm, blend_per_split=blends, blend_phases=[(9, [1, 1, 0]), (6, [0, 1, 2])])
    train, valid, _ = build(mm, [12, 5, 0], cfg)
    assert pairs_of(train) == phases_by_hand(train)
    assert len(valid.datasets) == 2
    with pytest.raises(ValueError, match="15 samples, but 20"):
        build(mm, [20, 0, 0], cfg)


# -- what is refused -------------------------------------------------------------------------------


TWO = ([A, B], [1, 1])
VALID_SETS = {"blend_per_split": [None, TWO, TWO], "multiple_validation_sets": True}
WHOLE_SETS = {"blend_per_split": [None, ([A, B], None), None], "full_validation": True}
BAD_SIZES = [  # sizes, fields of the config, words
    ([1, 2], {"blend": ([A], None)}, r"sizes.*\[1, 2\]"),
    ([-1, 0, 0], {"blend": ([A], None)}, "train.*-1"),
    ([None, 0, 0], {"blend": TWO}, "train .*needs a size"),
    ([0, None, None], VALID_SETS, "test .*needs a size"),  # valid is two datasets, and test a blend
    ([0, 5, 0], WHOLE_SETS | {"multiple_validation_sets": True}, "valid must be None"),
]


def test_sizes_are_refused_before_the_build(one, corpora):
    """As upstream refuses them.  A split without documents, or a single corpus, needs none."""
    for sizes, fields, words in BAD_SIZES:
        cfg = config(one, **fields)
        with pytest.raises(ValueError, match=words):
            one.BlendedMegatronDatasetBuilder(one.GPTDataset, sizes, yes, cfg)
    for fields in ({"blend": TWO}, {"blend_per_split": [TWO, None, ([A], [1])]}):
        assert len(build(one, [9, None, None], config(one, **fields))[0]) >= 9


def test_a_build_without_a_blend_is_of_mock_data(one):
    """Which no other class has."""
    cfg = config(one, sequence_length=4096)
    assert len(build(one, [3, 0, 0], cfg, one.MockGPTDataset)[0]) >= 3
    with pytest.raises(ValueError, match="MockGPTDataset"):
        build(one, [3, 0, 0], cfg)


def test_more_sequences_than_int32_numbers(one, corpora, monkeypatch):
    """Upstream: the numbers wrap."""
    huge = mock.Mock(return_value=2**31 + 2)
    monkeypatch.setattr(one.GPTDataset, "numel_low_level_dataset", huge)
    with pytest.raises(ValueError, match="2147483650 sequences"):
        build(one, [9, 0, 0], config(one, ([A], None)))


# -- several corpora at a time ---------------------------------------------------------------------


def test_corpora_are_built_side_by_side(one, corpora):
    """As many as there are threads, which wait for each other when they open and make datasets.

    The same datasets come out in the same order, and the same bytes in the cache.
    """

    class Together(one.GPTDataset):
        all_threads = None

        @staticmethod
        def build_low_level_dataset(path, cfg):
            Together.all_threads.wait()
            return one.GPTDataset.build_low_level_dataset(path, cfg)

        def __init__(self, *arguments):
            self.all_threads.wait()
            super().__init__(*arguments)

    found = []
    for threads in (1, 3):
        Together.all_threads = threading.Barrier(threads, timeout=20)
        fields = {"num_dataset_builder_threads": threads, "path_to_cache": f"cache{threads}"}
        train = build(one, [60, 0, 0], config(one, (corpora, [3, 1, 2]), **fields), Together)[0]
        assert [part.dataset_path for part in train.datasets] == corpora
        names = files_of(fields["path_to_cache"])
        found.append({k: names[k] for k in names if not k.endswith("manifest.json")})
    assert found[0] == found[1] != {}


def build_and_read(one, prefixes):
    """Build and read a blend of corpora in a process that begins with a soft limit of 256 files."""
    resource = importlib.import_module("resource")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    cfg = config(one, (prefixes, [1] * len(prefixes)), split="8,1,1")
    for dataset in build(one, [1500, 300, 300], cfg):
        assert len(dataset.batch(range(len(dataset)))["tokens"]) == len(dataset)


@linux
def test_a_build_of_150_corpora_may_open_enough_files(one, tmp_path):
    """Each has 2 files open, and 3 arrays for each split.  Upstream: a bare [Errno 24]."""
    prefixes = [mk(one, tmp_path / str(number), [[1] * 9] * 20) for number in range(150)]
    assert in_children(functools.partial(build_and_read, one, prefixes)) == [0]


# ==============================================================================
# 8. Samplers and resume
# ==============================================================================
# What a state holds besides the position is tested in section 14.


# -- The orders --------------------------------------------------------------------------------
# The oracle: all ranks have one order of samples, which is dealt to them round by round.

SHUFFLED = ["unsharded", "sharded"]
KINDS_OF_ORDER = ["single", "full_validation", *SHUFFLED]


def order_of_turn(kind, total, micro, ranks, seed=0, turn=0):
    """The samples of a turn, of all ranks; each round is a slice of them."""
    if kind in ("single", "full_validation"):
        return list(range(total))
    generator = torch.Generator().manual_seed(seed + turn)
    rounds = total // (micro * ranks)  # what fills no whole round is left out
    if kind == "unsharded":
        order = torch.randperm(total // micro * micro, generator=generator)
        return order[: rounds * micro * ranks].tolist()
    order = torch.randperm(rounds * micro, generator=generator)
    firsts = torch.arange(ranks) * rounds * micro  # of the part of each rank
    return (order[:, None] + firsts).flatten().tolist()


def dealt(kind, order, micro, ranks):
    """[[rank 0's batch, rank 1's batch, ...] of each whole round] of an order."""
    rounds = []
    per_round = micro * ranks
    for first in range(0, len(order) - per_round + 1, per_round):
        part = order[first : first + per_round]
        if kind == "single":
            rounds.append([part[rank * micro : (rank + 1) * micro] for rank in range(ranks)])
        else:
            rounds.append([part[rank::ranks] for rank in range(ranks)])
    return rounds


def sampler_of(mm, kind, *sizes, seed=0, drop_last=True):
    """sizes: samples in all, consumed samples, micro-batch size, rank, number of ranks."""
    if kind == "single":
        return mm.MegatronPretrainingSampler(*sizes, drop_last)
    if kind == "full_validation":
        return mm.MegatronFullValidationSampler(*sizes)
    return mm.MegatronPretrainingRandomSampler(None, *sizes, kind == "sharded", seed)


def samplers(mm, kind, total, consumed, micro, ranks, **more):
    """The samplers of all ranks."""
    found = []
    for rank in range(ranks):
        found.append(sampler_of(mm, kind, total, consumed, micro, rank, ranks, **more))
    return found


def one_pass(samplers):
    """[[rank 0's batch, rank 1's batch, ...] of each round] of a pass."""
    passes = [list(sampler) for sampler in samplers]
    return [list(batches) for batches in zip(*passes, strict=True)]


def test_rounds_of_each_order_by_hand(one):
    """8 samples for 2 ranks, in micro-batches of 2, as in the drawing of section 8."""
    for kind, wanted in {
        "single": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        "full_validation": [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]],
        "unsharded": [[[4, 7], [0, 3]], [[2, 1], [5, 6]]],
        "sharded": [[[0, 1], [4, 5]], [[3, 2], [7, 6]]],
    }.items():
        assert one_pass(samplers(one, kind, 8, 0, 2, 2)) == wanted


@pytest.mark.parametrize("kind", ["single", *SHUFFLED])
def test_an_order_is_dealt_to_the_ranks_round_by_round(one, kind):
    """From any place on, and then the turns that follow.  A length is that of a whole turn."""
    for rng in cases(100):
        micro, ranks = rng.integers(1, 5, 2).tolist()
        per_round = micro * ranks
        total = per_round + int(rng.integers(50))
        seed = int(rng.integers(100))
        turn = 0  # of "single": all turns are equal, and it counts the samples of one
        done = int(rng.integers(total + 1))
        if kind in SHUFFLED:
            turn = int(rng.integers(3))
            done = int(rng.integers(total // per_round)) * per_round
        consumed = turn * (total - total % per_round) + done
        all_ranks = samplers(one, kind, total, consumed, micro, ranks, seed=seed)
        for later in range(3):
            order = order_of_turn(kind, total, micro, ranks, seed, turn + later)
            wanted = dealt(kind, order[done:], micro, ranks)
            assert one_pass(all_ranks) == wanted, (total, consumed, micro, ranks, later)
            done = 0
        for rank, sampler in enumerate(all_ranks):
            assert len(sampler) == total // per_round
            assert sampler.micro_batch_times_data_parallel_size == per_round
            if kind == "single":
                assert sampler.get_start_end_idx() == (rank * micro, (rank + 1) * micro)


def test_without_drop_last_the_last_round_is_shared_out(one):
    """All ranks have equally many full batches, padded with None.  Upstream: they have not."""
    for rng in cases(200):
        total, micro, ranks = rng.integers(1, [60, 5, 5]).tolist()
        consumed = int(rng.integers(total + 1))
        all_ranks = samplers(one, "single", total, consumed, micro, ranks, drop_last=False)
        rounds = one_pass(all_ranks)
        assert len(rounds) == math.ceil((total - consumed) / (micro * ranks))
        assert len(all_ranks[0]) == math.ceil(total / (micro * ranks))
        found = []
        for batches in rounds:
            assert [len(batch) for batch in batches] == [micro] * ranks
            samples = [[k for k in batch if k is not None] for batch in batches]
            sizes = [len(part) for part in samples]
            assert max(sizes) - min(sizes) <= 1
            found += itertools.chain(*samples)
        assert found == list(range(consumed, total))
        whole = one_pass(samplers(one, "single", total, consumed, micro, ranks))
        assert rounds[: len(whole)] == whole
        if micro == 1:  # full validation is just so, whatever micro-batch size it is given
            assert one_pass(samplers(one, "full_validation", total, consumed, 9, ranks)) == rounds


def test_a_sampler_refuses_sizes_and_places_that_cannot_be(one):
    for kind, sizes, field in (  # see sampler_of
        ("single", (0, 0, 1, 0, 1), "total_samples"),
        ("single", (8, -1, 1, 0, 1), "consumed_samples"),
        ("single", (8, 9, 1, 0, 1), "consumed_samples"),
        ("single", (8, 0, 1.5, 0, 1), "micro_batch_size"),
        ("single", (8, 0, 1, 2, 2), "data_parallel_rank"),
        ("full_validation", (8, 0, 1, -1, 2), "data_parallel_rank"),
        ("sharded", (3, 0, 2, 0, 2), "total_samples"),  # no whole round
        ("unsharded", (64, 24, 16, 0, 2), "consumed_samples"),  # no whole number of rounds
        ("sharded", (8, -2, 2, 0, 1), "consumed_samples"),
    ):
        with pytest.raises(ValueError, match=f"^{field}"):
            sampler_of(one, kind, *sizes)


# -- Resume: what may be another in the next job, and what may not -----------------------------


class Numbers(torch.utils.data.Dataset):
    """Sample k is {"k": k}; padding is -1."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, k):
        assert k is None or 0 <= k < self.n
        return {"k": -1 if k is None else k}


def fields_of(kind):
    """The arguments of build_pretraining_data_loader() for a kind of order."""
    if kind == "full_validation":
        return {"full_validation": True}
    if kind == "single":
        return {"dataloader_type": "single", "drop_last": False}
    return {"dataloader_type": "cyclic", "data_sharding": kind == "sharded"}


def loader_of(mm, dataset, consumed=0, **fields):
    """A loader; by default of one rank, and of batches of 4 samples."""
    return mm.build_pretraining_data_loader(dataset, consumed, **{"micro_batch_size": 4} | fields)


def rounds_of(loaders):
    """(the samples of all ranks, sorted, without padding; the state after it) of each round."""
    for batches in zip(*loaders, strict=True):
        numbers = torch.cat([batch["k"] for batch in batches])
        states = [loader.state_dict() for loader in loaders]
        assert states == states[:1] * len(loaders), "equal on all ranks"
        yield sorted(numbers[numbers >= 0].tolist()), states[0]


RESUMES = [  # order, total samples, (micro-batch size, ranks) before, and after
    ("single", 65, (2, 4), (3, 3)),
    ("single", 65, (3, 3), (5, 1)),
    ("full_validation", 10, (1, 3), (1, 4)),
    ("unsharded", 64, (1, 8), (8, 1)),
    ("unsharded", 67, (4, 2), (4, 3)),
    ("sharded", 66, (2, 4), (2, 4)),
    ("sharded", 64, (2, 4), (4, 4)),
]


@pytest.mark.parametrize("kind, total, before, after", RESUMES, ids=str)
def test_a_run_may_stop_after_any_round(one, kind, total, before, after):
    """What was read before and what is read then are the order of a run that never stopped."""

    def loaders(micro, ranks):
        fields = fields_of(kind) | {"micro_batch_size": micro, "data_parallel_size": ranks}
        numbers = Numbers(total)
        return [
            loader_of(one, numbers, data_parallel_rank=rank, seed=3, **fields)
            for rank in range(ranks)
        ]

    def in_rounds(order, per_round):
        parts = [order[first : first + per_round] for first in range(0, len(order), per_round)]
        return [sorted(part) for part in parts]

    stops = [([], loaders(*before)[0].state_dict()), *rounds_of(loaders(*before))]
    order = order_of_turn(kind, total, *before, seed=3)
    assert [samples for samples, _ in stops[1:]] == in_rounds(order, math.prod(before))
    done = 0
    for samples, state in stops:
        done += len(samples)
        assert state["consumed_samples"] == done
        resumed = loaders(*after)
        if kind in SHUFFLED and done % math.prod(after):
            with pytest.raises(ValueError, match="consumed_samples"):  # (a) of section 8
                resumed[0].load_state_dict(state)
            continue
        for loader in resumed:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            assert len(loader) == len(loader.batch_sampler), "that of a whole pass"
        rest = order_of_turn(kind, total, *after, seed=3)[done:]
        if kind in SHUFFLED and not rest:
            rest = order_of_turn(kind, total, *after, seed=3, turn=1)
        assert [found for found, _ in rounds_of(resumed)] == in_rounds(rest, math.prod(after))


CYCLIC = {"dataloader_type": "cyclic"}  # and sharded, if nothing else is said
UNSHARDED = CYCLIC | {"data_sharding": False}
TWO_RANKS = {"data_parallel_size": 2}
HALVES = {"micro_batch_size": 2}
OTHER_ORDERS = [  # fields of the run that stopped, fields that are others here, what differs
    ({}, {"total": 65}, "length of corpus 0"),
    ({}, UNSHARDED, "sampler"),
    (UNSHARDED, {"seed": 1}, "seed"),
    (CYCLIC, UNSHARDED, "data_sharding"),
    (CYCLIC, TWO_RANKS | HALVES, "data_parallel_size"),
    (UNSHARDED | {"total": 67}, HALVES, "samples that are shuffled"),  # (b) of section 8
    (UNSHARDED | {"total": 20, "consumed": 40}, TWO_RANKS, "done in the turn"),  # (c)
]


@pytest.mark.parametrize("saved, changes, key", OTHER_ORDERS, ids=str)
def test_a_state_of_another_order_is_refused(one, saved, changes, key):
    """Upstream: the run goes on, with other samples.  Here it does so with strict=False."""

    def loader_of_numbers(total=64, consumed=8, **fields):
        return loader_of(one, Numbers(total), consumed, **fields)

    state = loader_of_numbers(**saved).state_dict()
    loader = loader_of_numbers(**saved | changes | {"consumed": 0})
    before = loader.state_dict()
    with pytest.raises(ValueError, match=key):
        loader.load_state_dict(state)
    assert loader.state_dict() == before, "nothing was changed"
    loader.load_state_dict(state, strict=False)
    assert loader.state_dict()["consumed_samples"] == state["consumed_samples"]


# ==============================================================================
# 9. Parallel batches
# ==============================================================================


# -- The groups of ranks -----------------------------------------------------------------------

GROUPS = ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp-pp")


def test_the_ranks_of_each_kind_by_hand(one):
    """tp varies fastest, then (cp,) dp, pp."""
    for kind, wanted in {
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "dp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "cp": [[0], [1], [2], [3], [4], [5], [6], [7]],
        "pp-tp": [[0, 1, 4, 5], [2, 3, 6, 7]],
    }.items():
        assert one.ParallelGroups.rank_lists(kind, tensor=2, data=2, pipeline=2) == wanted
    assert one.ParallelGroups.rank_lists("tp-cp-dp-pp") == [[0]], "every size is 1 by default"


def test_one_process_is_the_only_rank_of_every_group(one, monkeypatch):
    groups = one.ParallelGroups()
    assert groups.is_first_stage
    assert groups.is_last_stage
    for kind in (*GROUPS, "cp-pp"):  # any kind has a size, though not a process group
        assert (groups.rank(kind), groups.size(kind)) == (0, 1)
    assert groups.group("tp") is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    one.ParallelGroups()
    monkeypatch.setenv("WORLD_SIZE", "4")  # every rank would be rank 0 of one
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        one.ParallelGroups()


def test_layouts_that_cannot_be(one):
    with pytest.raises(ValueError, match="tp-ep"):
        one.ParallelGroups.rank_lists("tp-ep")
    with pytest.raises(ValueError, match="data=0"):
        one.ParallelGroups.rank_lists("tp", data=0)
    with pytest.raises(ValueError, match="cp-pp"):
        one.ParallelGroups().group("cp-pp")
    for tensor, pipeline in ((2, 1), (0, 1), (-1, -1)):
        with pytest.raises(ValueError, match=f"tensor.{tensor}"):
            one.ParallelGroups(tensor=tensor, pipeline=pipeline)


def test_batches_travel_over_gloo_whatever_the_backend(one):
    """Where the backend is not gloo alone, such as nccl, batches have a group of their own."""
    torch.distributed.init_process_group(
        "cpu:gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        groups = one.ParallelGroups()
        assert groups.batch_group is not groups.group("tp")
        assert torch.distributed.get_backend(groups.batch_group) == "gloo"
    finally:
        torch.distributed.destroy_process_group()


# -- A batch that one process reads for itself -------------------------------------------------

FIVE = ["tokens", "labels", "loss_mask", "attention_mask", "position_ids"]
ROWS = 2
LENGTH = 16
SHAPE = {"micro_batch_size": ROWS, "sequence_length": LENGTH}
WITH_MASK = {"create_attention_mask": True}


def hand_made_batch(rng, rows=ROWS, length=LENGTH):
    """A batch as a loader's, in which all tokens count; with any mask, and any positions."""
    ids = torch.from_numpy(rng.integers(0, 50, (rows, length + 1)))
    return {
        "tokens": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "loss_mask": torch.ones(rows, length),
        "attention_mask": torch.from_numpy(rng.random((rows, 1, length, length)) < 0.5),
        "position_ids": torch.from_numpy(rng.integers(0, length, (rows, length))),
    }


def packed_batch(rng, lengths_of_rows):
    """A batch whose rows hold documents of these lengths."""
    total = sum(lengths_of_rows[0])
    batch = hand_made_batch(rng, len(lengths_of_rows), total)
    batch["cu_seqlens"] = torch.full((len(lengths_of_rows), total + 1), total, dtype=torch.int32)
    for row, lengths in enumerate(lengths_of_rows):
        starts = [0, *itertools.accumulate(lengths)]
        batch["cu_seqlens"][row, : len(starts)] = torch.tensor(starts)
    longest = [max(lengths) for lengths in lengths_of_rows]
    batch["max_seqlen"] = torch.tensor(longest, dtype=torch.int32)
    return batch


def same_batch(found, wanted, note=""):
    """Equal tensors under the keys that are wanted, None under the others of FIVE."""
    assert list(found)[:5] == FIVE, note
    assert {key for key, value in found.items() if value is not None} == set(wanted), note
    for key, value in wanted.items():
        same(found[key], value, (note, key))


def test_one_process_reads_its_own_batch(one):
    """With the mask and without; on a device ("meta" is on every machine); to the end."""
    batch = packed_batch(np.random.default_rng(1), [[4, 12], [7, 8, 1]])
    without_mask = {key: value for key, value in batch.items() if key != "attention_mask"}
    source = iter([batch, batch, batch])
    groups = one.ParallelGroups()
    same_batch(one.get_batch(source, groups, **SHAPE, **WITH_MASK), batch)
    same_batch(one.get_batch(source, groups, **SHAPE), without_mask)
    found = one.get_batch(source, groups, **SHAPE, **WITH_MASK, device="meta")
    assert {key: value.device.type for key, value in found.items()} == dict.fromkeys(batch, "meta")
    with pytest.raises(StopIteration):
        one.get_batch(source, groups, **SHAPE)


def test_a_batch_that_does_not_fit_is_refused(one):
    batch = hand_made_batch(np.random.default_rng(3))
    for changes, key in (
        ({"tokens": torch.zeros(2, 7, dtype=torch.int64)}, "tokens"),
        ({"tokens": torch.zeros(2, 16)}, "tokens"),  # floats
        ({"attention_mask": None}, "attention_mask"),
        ({"max_seqlen": torch.tensor([16, 16])}, "cu_seqlens"),  # one without the other
    ):
        with pytest.raises(ValueError, match=key):
            one.get_batch(iter([batch | changes]), one.ParallelGroups(), **SHAPE, **WITH_MASK)
    with pytest.raises(ValueError, match="data_iterator"):
        one.get_batch(None, one.ParallelGroups(), **SHAPE)


# -- The cut for context parallelism -----------------------------------------------------------


def kept_by_hand(lengths, rank, ranks):
    """The places that a rank keeps of documents of these lengths."""
    places = []
    start = 0
    for length in lengths:
        chunks = np.arange(start, start + length).reshape(2 * ranks, -1)
        places.extend(chunks[rank])
        places.extend(chunks[2 * ranks - 1 - rank])
        start += length
    return places


@pytest.mark.parametrize(
    "per_sequence, ranks, lengths_of_rows",
    [
        (False, 2, [[4, 8, 12], [24], [12, 12]]),
        (False, 3, [[6, 12, 6], [18, 6]]),
        (True, 2, [[3, 5, 4], [12], [1, 11]]),
        (True, 4, [[5, 11], [1, 2, 13]]),
    ],
    ids=str,
)
def test_documents_are_cut_one_by_one_or_as_a_sequence(one, per_sequence, ranks, lengths_of_rows):
    """With cu_seqlens each document is shared out by itself, unless the option says otherwise.

    The batch stays as it is.  Upstream: the dict is changed, and a second call cuts again.
    """
    batch = packed_batch(np.random.default_rng(5), lengths_of_rows)
    before = copy.deepcopy(batch)
    for rank in range(ranks):
        part = one.get_batch_on_this_cp_rank(
            batch, rank, ranks, use_per_sequence_balancing=per_sequence
        )
        assert part["cu_seqlens"] is batch["cu_seqlens"]
        assert part["max_seqlen"] is batch["max_seqlen"]
        for row, lengths in enumerate(lengths_of_rows):
            places = kept_by_hand([sum(lengths)] if per_sequence else lengths, rank, ranks)
            for key in ("tokens", "labels", "loss_mask", "position_ids"):
                same(part[key][row], batch[key][row, places], (key, rank))
            same(part["attention_mask"][row], batch["attention_mask"][row][:, places])
    same_samples(batch, before)


def test_what_has_no_axis_of_tokens_is_passed_on(one):
    """Upstream: it cannot cut the batch of a blend.  Here there are as many rows as tokens."""
    batch = hand_made_batch(np.random.default_rng(6), 8, 8)
    others = {"dataset_id": torch.arange(8), "attention_mask": None, "note": "text"}
    others["cu_seqlens"] = torch.full((8, 8), 8, dtype=torch.int32)
    others["max_seqlen"] = torch.full((8,), 8, dtype=torch.int32)
    others["scores"] = torch.zeros(8, 3)
    further = torch.arange(8 * 8 * 3).view(8, 8, 3)  # a tensor of the user's, with the axis
    part = one.get_batch_on_this_cp_rank(batch | others | {"further": further}, 1, 2)
    for key, value in others.items():
        assert part[key] is value
    assert part["tokens"].shape == (8, 4)
    same(part["further"], further[:, 2:6])


def test_what_cannot_be_cut_is_refused(one):
    """Upstream: another error, or none."""
    uneven = [[0, 8, 16], [0, 4, 10]]
    for length, cu_seqlens, rank, word in (  # of two ranks
        (10, None, 1, "10 tokens"),
        (16, uneven, 0, "document 1 of row 1.*use_per_sequence_balancing"),
        (16, [[0, 16, 16], [0, 12, 8]], 0, "cu_seqlens of row 1"),  # out of order
        (16, [[0, 16], [-8, 16]], 0, "cu_seqlens of row 1"),  # before the row
        (16, [[0, 16], [8, 24]], 0, "cu_seqlens of row 1"),  # behind it
        (8, None, 2, "cp_rank"),
    ):
        batch = {"tokens": torch.zeros(2, length)}
        if cu_seqlens is not None:
            batch["cu_seqlens"] = torch.tensor(cu_seqlens)
        with pytest.raises(ValueError, match=word):
            one.get_batch_on_this_cp_rank(batch, rank, 2)
        assert one.get_batch_on_this_cp_rank(batch, 0, 1) == batch


# -- Jobs of real processes --------------------------------------------------------------------
# A scenario is a function of a Job, and perhaps of an argument; it runs on every rank of a job, and
# what it asserts must hold on each (fixture run_on_ranks).

LIMIT = 60  # seconds after which a collective counts as hung
LAYOUTS = {  # {ranks: (tensor, context, pipeline) of each layout}
    2: [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)],
    4: [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4)],
}
two_or_four_ranks = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])


def write_corpora(folder):
    """a and b, whose documents end in eod (0); even, whose documents can be cut for 4 cp ranks."""
    mm = copy_of_module("python")
    rng = np.random.default_rng(11)
    for name in ("a", "b"):
        docs = [np.append(rng.integers(1, 99, n), 0) for n in rng.integers(2, 14, 60)]
        mk(mm, folder / name, docs)
    mk(mm, folder / "even", [rng.integers(1, 99, 8 * n) for n in rng.integers(1, 5, 40)])


@dataclasses.dataclass(eq=False)
class Job:
    """What a scenario gets on each rank."""

    mm: types.ModuleType
    rank: int
    world: int
    folder: pathlib.Path

    def groups(self, layout):
        sizes = dict(zip(("tensor", "context", "pipeline"), layout, strict=True))
        return self.mm.ParallelGroups(**sizes)

    def share(self, tensors):
        """This rank's part of each tensor."""
        return [tensor.chunk(self.world)[self.rank] for tensor in tensors]


def run_on_rank(rank, world, folder, scenarios, arguments):
    """Run the scenarios, each with all of the arguments, as one rank of a job."""
    os.fsync = do_not_wait
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=LIMIT),
    )
    try:
        job = Job(copy_of_module("python"), rank, world, folder)
        for scenario in scenarios:
            if not arguments:
                scenario(job)
            for argument in arguments:
                scenario(job, argument)
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def processes():
    """Processes for ranks; they are not forked, since this process may have threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])  # once, not on every rank
    with concurrent.futures.ProcessPoolExecutor(max(LAYOUTS), context) as pool:
        yield pool


@pytest.fixture
def run_on_ranks(processes, tmp_path_factory):
    """run_on_ranks(world, scenarios, arguments): fails if a scenario fails on a rank.

    Each is called once for each argument, or once without one; all calls are made in one job.
    """

    def run(world, scenarios, arguments=()):
        folder = tmp_path_factory.mktemp("job")
        write_corpora(folder)
        ranks = []
        for rank in range(world):
            job = rank, world, folder, scenarios, arguments
            ranks.append(processes.submit(run_on_rank, *job))
        for future in ranks:
            future.result(5 * LIMIT)

    return run


@contextlib.contextmanager
def collectives():
    """The collectives that this rank starts in the block, a list of (name, bytes or None)."""
    calls = []

    def spy(name):
        collective = getattr(torch.distributed, name)

        def call(sent, *args, **kwargs):
            calls.append((name, getattr(sent, "nbytes", None)))
            return collective(sent, *args, **kwargs)

        return call

    names = ("broadcast", "broadcast_object_list", "all_reduce")
    with mock.patch.multiple(torch.distributed, **{name: spy(name) for name in names}):
        yield calls


# -- Batches on ranks --------------------------------------------------------------------------


def groups_are_those_of_rank_lists(job, layout):
    tensor, context, pipeline = layout
    groups = job.groups(layout)
    sizes = {"tensor": tensor, "context": context, "pipeline": pipeline}
    sizes["data"] = job.world // math.prod(layout)
    assert groups.sizes == sizes
    names = ("pp", "dp", "cp", "tp")  # README: the order of a mesh of torch
    shape = [groups.size(axis) for axis in names]
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    for kind in GROUPS:
        lists = job.mm.ParallelGroups.rank_lists(kind, **sizes)
        [mine] = [ranks for ranks in lists if job.rank in ranks]
        assert torch.distributed.get_process_group_ranks(groups.group(kind)) == mine
        assert (groups.rank(kind), groups.size(kind)) == (mine.index(job.rank), len(mine))
        if kind in names:
            assert mesh[kind].mesh.tolist() == groups.ranks(kind)
    assert groups.is_first_stage == (groups.rank("pp") == 0)
    assert groups.is_last_stage == (groups.rank("pp") == pipeline - 1)
    with pytest.raises(ValueError, match="tensor 3"):
        job.mm.ParallelGroups(tensor=3)


def part_of_stage(batch, groups, mask=False, mtp=False):
    """What of a loader's batch the pipeline stage of this rank needs."""
    keys = []
    if groups.is_first_stage or (groups.is_last_stage and mtp):
        keys += ["tokens", "position_ids"]
    if groups.is_last_stage:
        keys += ["labels", "loss_mask"]
    if keys:
        keys += ["cu_seqlens", "max_seqlen"]
    if keys and mask:
        keys.append("attention_mask")
    return {key: batch[key] for key in keys if key in batch}


def source_on_rank(batches, groups):
    """An iterator over batches on a rank that reads for others, None on the others."""
    if groups.rank("tp") == 0 and (groups.is_first_stage or groups.is_last_stage):
        return iter(batches)
    return None


RESETS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
DOCUMENTS = {"inter_document_masking": True}
PER_SEQUENCE = {"use_per_sequence_balancing": True}
LOADERS = [  # (corpora, fields of the config, options of get_batch)
    (["a"], WITH_MASK | RESETS, WITH_MASK),
    (["a"], DOCUMENTS, PER_SEQUENCE),
    (["even"], DOCUMENTS, {}),
    (["a", "b"], {"reset_position_ids": True}, {"mtp": True}),
]


def batches_of_loaders(job, layout):
    """Each is the part of the batch that one process would read, and is sent in one broadcast.

    With the packing in a second one.  A status of 8 bytes goes first, and nothing else is sent.
    """
    groups = job.groups(layout)
    tensor, context, _ = layout
    for corpora, fields, options in LOADERS:
        prefixes = [str(job.folder / corpus) for corpus in corpora]
        weights = list(range(1, len(prefixes) + 1))
        cfg = config(job.mm, (prefixes, weights), sequence_length=LENGTH, **fields)
        loader = job.mm.build_pretraining_data_loader(
            quiet(build, job.mm, [24, 0, 0], cfg)[0],
            0,
            micro_batch_size=ROWS,
            data_parallel_rank=groups.rank("dp"),
            data_parallel_size=groups.size("dp"),
        )
        balancing = {}
        if options == PER_SEQUENCE:
            balancing = PER_SEQUENCE
        source = source_on_rank(loader, groups)
        for whole in loader:
            wanted = part_of_stage(whole, groups, options == WITH_MASK, "mtp" in options)
            num_bytes = 0
            num_calls = 0
            if tensor > 1:
                num_bytes = 8 + sum(value.nbytes for value in wanted.values())
                num_calls = 2 if "cu_seqlens" in wanted else 1
            with collectives() as sent:
                found = job.mm.get_batch(source, groups, **SHAPE, **options)
            wanted = job.mm.get_batch_on_this_cp_rank(
                wanted, groups.rank("cp"), context, **balancing
            )
            same_batch(found, wanted, corpora)
            assert all(value is None or value.is_contiguous() for value in found.values())
            assert [name for name, _ in sent] == ["broadcast"] * num_calls
            assert sum(size for _, size in sent) == num_bytes
        if wanted:
            with pytest.raises(StopIteration):
                job.mm.get_batch(source, groups, **SHAPE, **options)


def odd_batches_arrive_as_they_are(job, layout):
    """Batches that no loader of ours makes, in the promised dtypes."""
    groups = job.groups(layout)
    rng = np.random.default_rng(12)
    right = packed_batch(rng, [[4, 12], [8, 8]])
    for change in (
        {"tokens": right["tokens"] + 2**62, "labels": -right["labels"]},
        {"loss_mask": right["loss_mask"].double() * math.nan, "position_ids": right["tokens"]},
        {"tokens": right["tokens"].t().contiguous().t()},
        {"cu_seqlens": right["cu_seqlens"].flip(0), "max_seqlen": right["max_seqlen"] + 1},
        {key: value.short() for key, value in right.items() if key != "loss_mask"},
    ):
        batch = right | change
        source = source_on_rank([batch], groups)
        found = job.mm.get_batch_on_this_tp_rank(source, groups, **SHAPE, **WITH_MASK)
        wanted = {key: value.to(right[key].dtype) for key, value in batch.items()}
        same_batch(found, part_of_stage(wanted, groups, mask=True), list(change))


def a_failing_reader_fails_on_all_ranks_of_its_group(job, layout):
    """And the batches before and after it arrive.  The error follows in a second broadcast."""
    groups = job.groups(layout)
    good = hand_made_batch(np.random.default_rng(0))
    wanted = part_of_stage(good, groups)
    if not wanted:
        return
    num_bytes = 8 + sum(value.nbytes for value in wanted.values())
    for item, kind, words in (
        (ValueError("no such sample"), ValueError, "no such sample"),
        (ZeroDivisionError("by zero"), RuntimeError, "by zero"),
        (StopIteration(), StopIteration, ""),
        ("not a batch", ValueError, "dict"),
    ):
        source = mock.MagicMock()  # an iterator that goes on after an error
        source.__next__ = mock.Mock(side_effect=[good, item, good])
        same_batch(job.mm.get_batch_on_this_tp_rank(source, groups, **SHAPE), wanted)
        with collectives() as sent, pytest.raises(Exception, match=words) as caught:
            job.mm.get_batch_on_this_tp_rank(source, groups, **SHAPE)
        if groups.size("tp") > 1:
            assert sent == [("broadcast", num_bytes), ("broadcast_object_list", None)]
            assert type(caught.value) is kind
            assert str(caught.value).startswith(f"rank {groups.ranks('tp')[0]}: ")
        else:  # there is nobody to tell
            assert sent == []
            assert caught.value is item or item == "not a batch"
        same_batch(job.mm.get_batch_on_this_tp_rank(source, groups, **SHAPE), wanted)


@two_or_four_ranks
def test_batches_on_ranks(run_on_ranks, world):
    scenarios = [
        groups_are_those_of_rank_lists,
        batches_of_loaders,
        odd_batches_arrive_as_they_are,
        a_failing_reader_fails_on_all_ranks_of_its_group,
    ]
    run_on_ranks(world, scenarios, LAYOUTS[world])


# ==============================================================================
# 10. Gradients
# ==============================================================================


class Net(torch.nn.Module):
    """Tied weights, a branch that few tokens take, parts frozen and unused, a second dtype."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.never = torch.nn.Linear(3, 3)
        self.sometimes = torch.nn.Linear(5, 5)  # of token 0 alone
        self.embedding = torch.nn.Embedding(11, 5)
        self.inner = torch.nn.Linear(5, 7)
        self.outer = torch.nn.Linear(7, 5, dtype=torch.float64)
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.head = torch.nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        x = self.outer(torch.tanh(self.inner(x)).double()).float() + self.frozen(x)
        if (ids == 0).any():
            x = x + self.sometimes(x) * (ids == 0)[..., None]
        return self.head(x)


def step_data(seed=0):
    """Tokens, labels, weights; token 0 is in one row, but nowhere in the data of seed 9."""
    rng = np.random.default_rng([13, seed])
    ids = torch.from_numpy(rng.integers(1, 11, (8, 6)))
    if seed != 9:
        ids[1, 2] = 0
    return ids, torch.from_numpy(rng.integers(0, 11, (8, 6))), torch.ones(8, 6)


def losses(net, ids, labels, weights):
    """The loss of each token, times its weight."""
    out = net(ids).flatten(0, 1)
    each = torch.nn.functional.cross_entropy(out, labels.flatten(), reduction="none")
    return each * weights.flatten()


def gradients(net):
    """{name: gradient}, zeros where there is none."""
    found = {}
    for name, param in net.named_parameters():
        if param.requires_grad:
            found[name] = torch.zeros_like(param) if param.grad is None else param.grad.clone()
    return found


def gradients_of_one(seeds=(0,)):
    """Those of one process that runs the steps' data: of the mean over all tokens."""
    net = Net()
    for seed in seeds:
        (losses(net, *step_data(seed)).mean() / len(seeds)).backward()
    return gradients(net)


def close(found, wanted):
    """Equal but for rounding."""
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def check_gradients(ddp, wanted):
    """The gradients of the module; with a distributed optimizer, of this rank's shards alone."""
    if not ddp.use_distributed_optimizer or ddp.size == 1:
        close(gradients(ddp.module), wanted)
        return
    found = [shard.clone() for shard in ddp.grad_shards]
    assert ddp.size * sum(map(len, found)) == sum(map(len, ddp.grad_buffers))
    for buffer in ddp.grad_buffers:
        buffer.zero_()  # the padding
    for name, param in ddp.module.named_parameters():
        if param.requires_grad:
            param.main_grad.copy_(wanted[name])
    close(found, ddp.grad_shards)


CHOICES = {
    "bucket_size": (1, 40, 10**9),
    "overlap_grad_reduce": (False, True),
    "use_distributed_optimizer": (False, True),
}
OPTIONS = [dict(zip(CHOICES, row, strict=True)) for row in itertools.product(*CHOICES.values())]


# -- The gradients of one process --------------------------------------------------------------


def test_gradients_live_in_one_buffer_a_dtype(one):
    """In reverse order of the parameters; buckets of at least bucket_size elements."""
    net = Net()
    ddp = one.DistributedDataParallel(net, bucket_size=42)
    for buffer in ddp.grad_buffers:
        buffer.copy_(torch.arange(len(buffer)))
    places = {torch.float64: [], torch.float32: []}
    for param in reversed(list(net.parameters())):
        if param.requires_grad:
            assert param.grad is param.main_grad
            places[param.dtype] += param.grad.flatten().tolist()
        else:
            assert param.grad is None
    assert [buffer.dtype for buffer in ddp.grad_buffers] == list(places)
    for buffer in ddp.grad_buffers:
        assert places[buffer.dtype] == list(range(len(buffer))), "a tied parameter is there once"
    assert [len(shard) for shard in ddp.grad_shards] == [40, 42, 55, 42]


def test_a_dropped_wrapper_is_freed_and_a_model_can_be_wrapped_again(one):
    net = torch.nn.Linear(2, 2)
    for _ in range(2):
        model = one.DistributedDataParallel(net, overlap_grad_reduce=True)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            model.finish_grad_sync()
            model.zero_grad_buffer()
    gone = [weakref.ref(model), weakref.ref(net)]
    del model, net
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def with_new_parameters(ddp):
    ddp.module.load_state_dict(ddp.module.state_dict(), assign=True)
    return ddp


CHANGES = [  # what is done with a wrapped model, whether its gradients are averaged all the same
    (lambda ddp: ddp.to(memory_format=torch.channels_last), True),
    (copy.deepcopy, True),
    (lambda ddp: ddp.double(), False),
    (lambda ddp: ddp.bfloat16(), False),
    (lambda ddp: ddp.to("meta"), False),
    (lambda ddp: ddp.requires_grad_(), False),
    (lambda ddp: pickle.loads(pickle.dumps(ddp)), False),
    (with_new_parameters, False),
]


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_model_that_changes_after_it_was_wrapped(one, set_to_none):
    """Its gradients are in the buffer all the same, or it is refused: they would be nowhere."""
    for change, is_right in CHANGES:
        net = torch.nn.Conv2d(3, 4, 3)
        net.bias.requires_grad_(False)
        ddp = one.DistributedDataParallel(net)
        if set_to_none:
            net.zero_grad()
        ddp = change(ddp)
        if not is_right:
            with pytest.raises(ValueError, match="was converted, replaced or unfrozen"):
                ddp.zero_grad_buffer()
            continue
        for _ in range(2):
            ddp.zero_grad_buffer()
            ddp(torch.arange(27.0).view(1, 3, 3, 3)).sum().backward()
            ddp.finish_grad_sync()
        assert ddp.grad_buffers[0].tolist() == [*range(27)] * 4


def test_nccl_may_divide_by_the_ranks(one, group, monkeypatch):
    """One process that stands for two ranks: what it would send, and how it is added."""
    monkeypatch.setattr(torch.distributed, "get_world_size", mock.Mock(return_value=2))
    average, add = torch.distributed.ReduceOp.AVG, torch.distributed.ReduceOp.SUM
    for backend, may_average, wanted in (
        ("nccl", True, (average, [3, 4])),
        ("nccl", False, (add, [1.5, 2])),
        ("gloo", True, (add, [1.5, 2])),  # it cannot divide
    ):
        sent = mock.Mock()
        monkeypatch.setattr(torch.distributed, "get_backend", mock.Mock(return_value=backend))
        monkeypatch.setattr(torch.distributed, "all_reduce", sent)
        net = torch.nn.Linear(2, 1, bias=False)
        ddp = one.DistributedDataParallel(net, average_in_collective=may_average)
        ddp(torch.tensor([[3.0, 4.0]])).sum().backward()
        ddp.finish_grad_sync()
        buffer, operation, *_ = sent.call_args.args
        assert (operation, buffer.tolist()) == wanted


# -- The micro-batches of a step ---------------------------------------------------------------


def mean_step(data, model):
    """A forward_step_func whose loss is a mean."""
    return losses(model, *next(data)), mean_loss


def mean_loss(each):
    return each.mean(), each.detach().mean().item()


def sum_step(data, model):
    """A forward_step_func whose loss is a sum, with the number of tokens that count."""
    ids, labels, weights = next(data)
    return (losses(model, ids, labels, weights), weights.sum()), sum_loss


def sum_loss(output):
    each, num_tokens = output
    return each.sum(), num_tokens, each.detach().mean().item()


def run_step(mm, step, data, model, **options):
    """forward_backward_no_pipelining() over all of the data -> the reports."""
    return mm.forward_backward_no_pipelining(
        forward_step_func=step,
        data_iterator=iter(data),
        model=model,
        num_microbatches=len(data),
        **options,
    )


def test_all_parts_of_a_model_are_finished(one):
    parts = [mock.Mock(), mock.Mock()]
    one.finalize_model_grads(parts)
    for part in parts:
        part.finish_grad_sync.assert_called_once_with()


@pytest.mark.parametrize("step", [mean_step, sum_step])
def test_a_step_has_the_gradients_of_the_mean_over_its_micro_batches(one, step):
    """Of a plain model too.  forward_only leaves them as they are."""
    data = [step_data(seed) for seed in range(3)]
    for wrap in (False, True):
        net = Net()
        model = net
        if wrap:
            model = one.DistributedDataParallel(net)
            model.broadcast_params()
        wanted = [losses(net, *part).mean().item() for part in data]
        for forward_only in (False, True):
            with torch.set_grad_enabled(not forward_only):
                reports = run_step(one, step, data, model, forward_only=forward_only)
            assert reports == pytest.approx(wanted)
            close(gradients(net), gradients_of_one(range(3)))


def test_a_step_without_a_token_that_counts_has_gradients_of_0(one):
    net = Net()
    ids, labels, weights = step_data()
    run_step(one, sum_step, [(ids, labels, 0 * weights)], net)
    assert not any(gradient.any() for gradient in gradients(net).values())


def test_steps_and_buckets_that_cannot_be(one):
    """Without pipelining there is one model: a second would be left out in silence."""
    with pytest.raises(ValueError, match="num_microbatches"):
        run_step(one, mean_step, [], Net())
    with pytest.raises(ValueError, match="one model"):
        run_step(one, mean_step, [step_data()], [Net(), Net()])
    with pytest.raises(ValueError, match="bucket_size"):
        one.DistributedDataParallel(Net(), bucket_size=0)


# -- Gradients on ranks: any number of ranks gives those of one process ------------------------
# The scenarios run as those of section 9, each with several of OPTIONS.


def wrapped(job, options, net=None):
    return job.mm.DistributedDataParallel(Net() if net is None else net, **options)


def backward(job, ddp, seed=0):
    """Backward of this rank's share of a step."""
    losses(ddp, *job.share(step_data(seed))).mean().backward()


def gradients_of_several_steps(job, options):
    """The second takes the branch on no rank.  An optimizer may set gradients to None or to zero.

    To finish a step twice changes nothing.
    """
    ddp = wrapped(job, options)
    for seed, reset in ((0, "none"), (9, "buffer"), (0, "zero"), (0, "none")):
        wanted = gradients_of_one([seed])
        assert wanted["sometimes.bias"].any() == (seed == 0)
        backward(job, ddp, seed)
        ddp.finish_grad_sync()
        before = [buffer.clone() for buffer in ddp.grad_buffers]
        ddp.finish_grad_sync()
        assert all(map(torch.equal, before, ddp.grad_buffers))
        check_gradients(ddp, wanted)
        for param in ddp.module.parameters():
            assert param.grad is getattr(param, "main_grad", None)
        if reset == "buffer":
            ddp.zero_grad_buffer()
        else:
            ddp.module.zero_grad(set_to_none=reset == "none")


def a_rank_without_any_gradient(job, options):
    """It sends zeros, and nobody waits for it."""
    first = [tensor.chunk(job.world)[0] for tensor in step_data()]
    net = Net()
    (losses(net, *first).mean() / job.world).backward()
    ddp = wrapped(job, options)
    for _ in range(2):
        ddp.zero_grad_buffer()
        if job.rank == 0:
            losses(ddp, *first).mean().backward()
        ddp.finish_grad_sync()
    check_gradients(ddp, gradients(net))


def gradients_over_micro_batches(job, options):
    """Under no_sync() nothing is sent, nor where there is no backward."""
    parts = [job.share(step_data(seed)) for seed in range(3)]
    ddp = wrapped(job, options)
    for step in (mean_step, sum_step):
        ddp.module.zero_grad()
        with collectives() as sent:
            with ddp.no_sync():
                backward(job, ddp)
            run_step(job.mm, step, parts, ddp, forward_only=True)
        assert not sent
        assert ddp.module.inner.bias.grad is ddp.module.inner.bias.main_grad
        ddp.zero_grad_buffer()
        run_step(job.mm, step, parts, [ddp])
        check_gradients(ddp, gradients_of_one(range(3)))


def gradients_are_sent_during_backward(job, options):
    """Each once: those of the last layer, then those of the first.  Without overlap at the end.

    With overlap as soon as they are there: the last layer's before those of the first are known.
    """
    options = options | {"bucket_size": 4, "use_distributed_optimizer": False}
    first, last = (torch.nn.Linear(4, size, bias=False) for size in (4, 8))
    ddp = wrapped(job, options, torch.nn.Sequential(first, last))
    hidden = first(torch.ones(1, 4))
    sent_before = []
    with collectives() as during:
        hidden.register_hook(lambda gradient: sent_before.extend(during))
        last(hidden).sum().backward()
    with collectives() as after:
        ddp.start_grad_sync()
    with collectives() as at_the_end:
        ddp.finish_grad_sync()
    both = [("all_reduce", 128), ("all_reduce", 64)]
    if options["overlap_grad_reduce"]:
        assert (sent_before, during, after) == (both[:1], both, [])
    else:
        assert (sent_before, during, after) == ([], [], both)
    assert at_the_end == []


def a_second_backward_without_no_sync(job, options):
    """The gradients are on their way already: an error, and a fresh start after it.

    That start waits for what was sent: a sum that arrives later would be of the wrong step.
    """
    ddp = wrapped(job, options | {"overlap_grad_reduce": True}, torch.nn.Linear(3, 3))
    ddp(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        ddp(torch.ones(1, 3)).sum().backward()
    with mock.patch.object(torch.distributed, "all_reduce") as all_reduce:
        ddp.zero_grad_buffer()
        ddp(torch.ones(1, 3)).sum().backward()
        ddp.zero_grad_buffer()
    assert all_reduce.return_value.wait.call_count == all_reduce.call_count
    ddp(torch.ones(1, 3)).sum().backward()
    ddp.finish_grad_sync()
    check_gradients(ddp, {"weight": torch.ones(3, 3), "bias": torch.ones(3)})


def nan_is_named_once_with_its_parameter_and_rank(job, options):
    last = job.world - 1
    ddp = wrapped(job, options | {"check_for_nan_in_grad": True})
    (losses(ddp, *step_data()).mean() * (math.nan if job.rank == last else 1)).backward()
    with pytest.raises(ValueError, match=rf"^rank {last}: nan .*inner\.bias"):
        ddp.finish_grad_sync()
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    backward(job, ddp)
    ddp.finish_grad_sync()
    check_gradients(ddp, gradients_of_one())


def parameters_of_the_groups_first_rank_reach_all(job, options):
    """Frozen ones too."""
    pairs = job.groups((2, 1, 1)).group("tp")
    for group, first in ((None, 0), (pairs, job.rank // 2 * 2)):
        ddp = wrapped(job, options | {"group": group})
        for param in ddp.parameters():
            param.data.fill_(job.rank + 1)
        ddp.broadcast_params()
        assert all((param == first + 1).all() for param in ddp.parameters())


def gradients_of_uneven_tokens(job, options):
    """Sums over tokens, divided by those of all ranks: the mean over all of them."""
    ids, labels, weights = step_data()
    weights *= torch.from_numpy(np.random.default_rng(14).integers(0, 2, (8, 6)))
    weights[: 8 // job.world] = 0  # the first rank has none at all
    weights /= 512  # a number of tokens need not be whole
    net = Net()
    (losses(net, ids, labels, weights).sum() / weights.sum()).backward()
    mine = job.share((ids, labels, weights))
    count = mine[2].sum()
    for num_tokens in (count, count.item(), count.view(1)):
        ddp = wrapped(job, options)
        losses(ddp, *mine).sum().backward()
        job.mm.finalize_model_grads([ddp], num_tokens)
        check_gradients(ddp, gradients(net))
    ddp.zero_grad_buffer()
    (0 * losses(ddp, *mine).sum()).backward()
    job.mm.finalize_model_grads([ddp], 0)
    assert not any(gradient.any() for gradient in gradients(ddp.module).values())


@two_or_four_ranks
def test_gradients_on_ranks(run_on_ranks, world):
    """With a third of the options on two ranks, with all of them on four."""
    scenarios = [
        gradients_of_several_steps,
        a_rank_without_any_gradient,
        gradients_over_micro_batches,
        gradients_are_sent_during_backward,
        a_second_backward_without_no_sync,
        nan_is_named_once_with_its_parameter_and_rank,
        parameters_of_the_groups_first_rank_reach_all,
        gradients_of_uneven_tokens,
    ]
    run_on_ranks(world, scenarios, OPTIONS[::3] if world == 2 else OPTIONS)


def gradients_of_parallel_batches(job, layout):
    """Batches that get_batch cuts: over the dp-cp ranks, the gradients of one process."""
    groups = job.groups(layout)
    rng = np.random.default_rng(15)
    whole = hand_made_batch(rng, 8)
    whole["tokens"] %= 11
    whole["labels"] %= 11
    whole["loss_mask"] *= torch.from_numpy(rng.integers(0, 2, (8, LENGTH)))
    net = Net()
    run_step(job.mm, sum_step, [[whole[key] for key in FIVE[:3]]], net)
    rows = []
    for row in range(groups.rank("dp"), 8, groups.size("dp")):
        rows.append({key: value[row : row + 1] for key, value in whole.items()})
    source = source_on_rank(rows, groups)
    data = []
    for _ in rows:
        batch = job.mm.get_batch(source, groups, micro_batch_size=1, sequence_length=LENGTH)
        data.append([batch[key] for key in FIVE[:3]])
    ddp = wrapped(job, {"group": groups.group("dp-cp"), "overlap_grad_reduce": True})
    run_step(job.mm, sum_step, data, ddp)
    check_gradients(ddp, gradients(net))
    ddp = wrapped(job, {})  # over all ranks: the gradient of each tensor rank is in the sum
    for part in data:
        losses(ddp, *part).sum().backward()
    num_tokens = sum(weights.sum() for _, _, weights in data)
    job.mm.finalize_model_grads([ddp], num_tokens, groups)
    tensor, _, _ = layout
    check_gradients(ddp, {name: tensor * grad for name, grad in gradients(net).items()})


@two_or_four_ranks
def test_gradients_of_batches_that_are_cut_and_shared(run_on_ranks, world):
    one_stage = [sizes for sizes in LAYOUTS[world] if sizes[2] == 1]  # others lack tokens or labels
    run_on_ranks(world, [gradients_of_parallel_batches], one_stage)


# ==============================================================================
# 11. Whole files
# ==============================================================================


def write_pair(one, folder, size, error=None):
    with one.IndexedDatasetBuilder(folder / "p.bin", np.uint8) as builder:
        builder.add_document(np.ones(size, np.uint8), [size])
        if error is not None:
            raise error


FAILURES = {  # after how many bytes it fails, and the error; None: the disk is full
    "in the block": (1, ValueError()),
    "in the block, behind the buffer": (2 << 20, KeyboardInterrupt()),
    "disk full while it is written": (1 << 22, None),
    "disk full at the commit": (1 << 17, None),
}


@linux
@pytest.mark.parametrize("case", FAILURES)
def test_nothing_appears_on_an_error(one, tmp_path, case):
    """Nor changes what was there."""
    size, error = FAILURES[case]
    for before in ("nothing", "old files"):
        if before == "old files":
            write_pair(one, tmp_path, 3)
        files = files_of(tmp_path)
        with contextlib.ExitStack() as stack:
            caught = stack.enter_context(pytest.raises(type(error) if error else OSError))
            if error is None:
                stack.enter_context(files_of_64_kib())
            write_pair(one, tmp_path, size, error)
        assert error is not None or caught.value.errno == errno.EFBIG
        assert files_of(tmp_path) == files, before


def test_files_are_on_the_disk_before_they_get_their_names(one, tmp_path, monkeypatch):
    """A pair is whole whenever its .idx is there; a cache can be made again, and is not synced."""
    mk(one, tmp_path / "p", [[1]])
    replace = os.replace
    synced = set()
    events = []

    def note_sync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)

    def note_rename(source, target):
        events.append((os.path.basename(target), len(synced), (tmp_path / "p.idx").exists()))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    mk(one, tmp_path / "p", [[2, 3, 4]])
    moved, *named = events
    assert moved[0].endswith(".old.tmp")
    assert named == [("p.bin", 2, False), ("p.idx", 2, False)]  # both files are on the disk
    gpt(one, tmp_path / "p", sequence_length=2)
    assert len(events) > 3 and len(synced) == 2


def test_where_the_bin_cannot_be_renamed_the_old_idx_comes_back(one, tmp_path):
    """Here a folder has its name."""
    mk(one, tmp_path / "p", [[1]])
    os.remove(tmp_path / "p.bin")
    os.mkdir(tmp_path / "p.bin")
    before = files_of(tmp_path)
    with pytest.raises(OSError, match=r"p\.bin"):
        write_pair(one, tmp_path, 2)
    assert files_of(tmp_path) == before
    assert list(before) == ["p.idx"]


# In each of two generations these jobs make pairs whose files, and whose records' inputs, have the
# same sizes: only their bytes tell which generation a file is of.


def make_pair(one, inputs, folder, generation):
    with one.IndexedDatasetBuilder(folder / "p.bin", np.uint8, multimodal=True) as builder:
        lengths = [1, 3] if generation == 1 else [3, 1]
        builder.add_document([generation] * 4, lengths, [generation, generation])


def merge_pairs(one, inputs, folder, generation):
    one.merge([inputs / f"{generation}" / "p"] * 2, folder / "p", True)


def preprocess_two_keys(one, inputs, folder, generation):
    path = inputs / f"{generation}.jsonl"
    one.preprocess(path, folder / "p", json_keys=("a", "b"))


def files_of_pairs(folder):
    """{prefix: the bytes of .bin, .idx and record, None where one is missing}, by its .idx."""
    files = files_of(folder)
    pairs = {}
    for name in files:
        if name.endswith(".idx"):
            prefix = name.removesuffix(".idx")
            pairs[prefix] = [files.get(prefix + end) for end in (".bin", ".idx", ".record.json")]
    return pairs


def dies_at_a_call(job, number, error, works):
    """Run a job in which a call of os.replace, os.unlink or os.fsync fails -> was there one?

    number    of the call that fails, of all three functions together
    error     what it raises; None: the process is dead at once, as after a kill -9
    works     does it work before it fails, as a rename over a network may?
    """
    numbers = itertools.count(1)

    def call(function, *arguments, **options):
        fails = next(numbers) == number
        if fails and not works:
            fail()
        result = function(*arguments, **options)
        if fails:
            fail()
        return result

    def fail():
        if error is None:
            os._exit(9)
        raise error

    with pytest.MonkeyPatch.context() as patches:
        for name in ("replace", "unlink", "fsync"):
            patches.setattr(os, name, functools.partial(call, getattr(os, name)))
        if error is None:
            return in_children(job) == [9]
        try:
            job()
        except type(error):
            return True
    return False


@linux
def test_no_crash_leaves_a_mixed_pair(one, tmp_path):
    """At each call that gives, takes or syncs a file: the old pair, the new one, or no .idx.

    And no record of another pair than the one that it stands beside.
    """
    for g in (1, 2):
        (tmp_path / f"{g}").mkdir()
        make_pair(one, tmp_path, tmp_path / f"{g}", g)
        lines = [{"a": f"{g}", "b": f"{g}{g}"}, {"a": f"{g}{g}{g}", "b": ""}]
        (tmp_path / f"{g}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    errors = [OSError(errno.EIO, "broken"), KeyboardInterrupt(), SystemExit(143), None]
    crashes = 0
    for make in (make_pair, merge_pairs, preprocess_two_keys):
        for g in (1, 2):
            (tmp_path / make.__name__ / f"{g}").mkdir(parents=True)
            make(one, tmp_path, tmp_path / make.__name__ / f"{g}", g)
        old, new = [files_of_pairs(tmp_path / make.__name__ / f"{g}") for g in (1, 2)]
        for has_old, error, works in itertools.product([False, True], errors, [False, True]):
            for number in itertools.count(1):
                folder = tmp_path / f"{crashes} {make.__name__} {has_old} {works} {number}"
                folder.mkdir()
                if has_old:
                    old_folder = tmp_path / make.__name__ / "1"
                    shutil.copytree(old_folder, folder, dirs_exist_ok=True)
                job = functools.partial(make, one, tmp_path, folder, 2)
                crashed = dies_at_a_call(job, number, error, works)
                note = (make.__name__, has_old, error, works, number)
                for prefix, (tokens, index, record) in files_of_pairs(folder).items():
                    possible = [old[prefix], new[prefix]] if has_old else [new[prefix]]
                    found = [pair for pair in possible if pair[:2] == [tokens, index]]
                    assert len(found) == 1, note
                    assert record in (None, found[0][2]), note
                if not crashed:  # there is no such call
                    assert files_of_pairs(folder) == new, note
                    break
                crashes += 1
                if error is not None:
                    left = [name for name in os.listdir(folder) if name.endswith(".tmp")]
                    assert len(left) <= 1, ("what an unlink has failed to take", note)
    assert crashes >= 300


# ==============================================================================
# 12. The index cache
# ==============================================================================


INDEX_ARRAYS = ["document_index", "sample_index", "shuffle_index"]
BLEND_ARRAYS = ["dataset_index", "dataset_sample_index"]


@pytest.fixture
def wanted(one, pair):
    """The three arrays of 50 samples of the pair."""
    return arrays(gpt(one, pair, 50))


@pytest.fixture
def cache(tmp_path):
    """The folder of a cache, which is not there yet."""
    return str(tmp_path / "cache")


@pytest.fixture
def builds(one, monkeypatch):
    """Counts how often the arrays of a GPTDataset are built."""
    counted = mock.Mock(wraps=one.build_sample_idx)
    monkeypatch.setattr(one, "build_sample_idx", counted)
    return counted


def heard(function, *arguments, **options):
    """What a call returns, and the messages of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = function(*arguments, **options)
    return found, [str(warning.message) for warning in caught]


def start(mm, corpus, cache, n=50, **fields):
    """A job that starts: its GPTDataset, no array of which was read, and its warnings."""
    return heard(gpt, mm, corpus, n, path_to_cache=cache, **fields)


def cached(mm, corpus, cache, n=50, **fields):
    """A job that starts and reads: the arrays of its GPTDataset, and its warnings."""
    ds, of_start = start(mm, corpus, cache, n, **fields)
    found, of_access = heard(arrays, ds)
    return found, of_start + of_access


def stamps(folder):
    """What tells a file from one that was written again: {name: (time, inode)}."""
    found = {}
    for path in pathlib.Path(folder).iterdir():
        found[path.name] = (path.stat().st_mtime_ns, path.stat().st_ino)
    return found


def replace_file(path, content):
    """Put another file in its place, of the same time; None: no file."""
    time_ns = path.stat().st_mtime_ns
    path.unlink()
    if content is not None:
        path.write_bytes(content)
        os.utime(path, ns=(time_ns, time_ns))


# -- what is in the files --------------------------------------------------------------------------


def test_a_cache_is_built_once_then_found(one, pair, wanted, cache, builds, monkeypatch):
    """Plain .npy files and no warning; a second job writes nothing.  Nothing is synced."""
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=AssertionError))
    saved, of_first = start(one, pair, cache)
    before = stamps(cache)
    fields = {"fast_cache_load": True, "defer_npy_index_mmap": True}  # without effect
    found, of_second = start(one, pair, cache, **fields)
    for ds in (saved, found):  # both are mapped
        values, messages = heard(arrays, ds)
        assert messages + of_first + of_second == []
        same_arrays(values, wanted)
        with pytest.raises(ValueError, match="read-only"):
            ds.shuffle_index[0] = 1
    for name, values in zip(INDEX_ARRAYS, wanted, strict=True):
        assert file_of(cache, f"-{name}.npy").read_bytes() == npy(values)
    assert builds.call_count == 1
    assert stamps(cache) == before


def npy(array):
    """The bytes of an .npy file."""
    with io.BytesIO() as file:
        np.save(file, array)
        return file.getvalue()


def test_names_descriptions_and_manifests(one, pair, cache):
    """The description, as upstream writes it, says what was asked for; its md5 is in all names.

    The manifest says what the arrays were made from (those of a blend from the description alone),
    what a start needs to know of them, and their checks.  A later version must read it: whoever
    changes it makes all caches of users stale.
    """
    blend = build(one, [4, 0, 0], config(one, ([pair, pair], [1, 3]), path_to_cache=cache))[0]
    described = []
    for num_samples in (2, 4):  # shares of 4, and the surplus
        part = {"class": "GPTDataset", "dataset_path": pair, "num_samples": num_samples}
        part |= {"index_split": "train", "random_seed": 1234, "sequence_length": 8}
        part |= {"split": "1,0,0", "split_matrix": [[0, 1.0], None, None]}
        described.append(part | {"tokenizer": {"class": "Tok", "eod": 0}})
    of_blend = {"class": "BlendedDataset", "datasets": list(described), "split": "train"}
    described.append(of_blend | {"weights": [0.25, 0.75], "size": 4})

    idx = pathlib.Path(f"{pair}.idx").read_bytes()
    made_from = {
        "format": 4,
        "documents": f"0 to {len(PAIR) - 1}",
        "keeps_short": False,
        "extra_token": 1,
        "stable_order": False,
        "idx_size": len(idx),
        "idx_mtime_ns": os.stat(f"{pair}.idx").st_mtime_ns,
        "idx_ends": hashlib.md5(idx[:4096] + idx[-4096:]).hexdigest(),
    }
    manifests = []
    for part in blend.datasets:
        manifests.append({"made_from": made_from, "facts": list(part.epoch_plan)})
    manifests.append({"made_from": {"format": 4}, "facts": [1, 3]})

    names = set()
    of_classes = [INDEX_ARRAYS, INDEX_ARRAYS, BLEND_ARRAYS]
    for identifiers, manifest, of_class in zip(described, manifests, of_classes, strict=True):
        text = json.dumps(identifiers, indent=4).encode()
        stem = f"{hashlib.md5(text).hexdigest()}-{identifiers['class']}-train"
        assert pathlib.Path(cache, f"{stem}-description.txt").read_bytes() == text
        manifest["files"] = {}
        for name in of_class:
            content = pathlib.Path(cache, f"{stem}-{name}.npy").read_bytes()
            manifest["files"][name] = {"size": len(content), "crc32": zlib.crc32(content)}
            names.add(f"{stem}-{name}.npy")
        manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())
        assert json.loads(pathlib.Path(cache, f"{stem}-manifest.json").read_text()) == manifest
        names |= {f"{stem}-description.txt", f"{stem}-manifest.json"}
    assert set(os.listdir(cache)) == names


def test_without_path_to_cache_a_cache_is_beside_its_pair(one, pair):
    gpt(one, pair, 1)
    assert len(os.listdir(f"{pair}/cache/GPTDataset_indices")) == 5


def test_other_samples_have_another_key(one, pair, cache):
    """Flags that upstream's key leaves out too, where they are not as by default."""
    kinds = [
        {"split": "train"},
        {"split": "valid"},
        {"split": "train", "add_extra_token_to_sequence": False},
        {"split": "valid", "add_extra_token_to_sequence": False},
        {"split": "valid", "drop_last_partial_validation_sequence": False},
        {"stable_order": True},
        {"sequence_length": 9},
        {"random_seed": 1},
        {"tokenizer": Tok(1)},
    ]
    for number, fields in enumerate(kinds):
        found, of_first = cached(one, pair, cache, **fields)
        again, of_second = cached(one, pair, cache, **fields)
        same_arrays(again, found)
        assert of_first + of_second == []
        assert len(os.listdir(cache)) == 5 * (number + 1), fields
    flag = "drop_last_partial_validation_sequence"
    assert flag not in gpt(one, pair, 9).unique_identifiers
    assert gpt(one, pair, 9, "valid", **{flag: False}).unique_identifiers[flag] is False


def test_other_documents_make_a_cache_stale(one, pair, cache):
    """They are not in the key, as in upstream, where they share arrays; a range is as a list."""
    for documents in (
        range(4),
        [0, 1],
        [0, 2],
        [0, 2, 3],
        [0, 2, 1, 3],
        range(1, 4),
        range(3, 0, -1),
    ):
        as_array = {"documents": np.array(documents, np.int32)}
        found, messages = cached(one, pair, cache, 9, **as_array)
        assert len(messages) == (documents != range(4))
        assert all("documents was" in message for message in messages)
        same_arrays(found, cached(one, pair, f"{cache} {documents}", 9, **as_array)[0])
        assert cached(one, pair, cache, 9, documents=documents)[1] == []
    nothing = {"n": None, "documents": np.array([], np.int32)}
    for _ in range(2):
        assert cached(one, pair, cache, **nothing)[1] == []


def test_what_a_subclass_is_made_from(one, pair, cache):
    """It is in the manifest, as JSON has it; what JSON does not have is an error."""

    class Own(one.GPTDataset):
        own = 1

        def made_from(self):
            return super().made_from() | {"own": self.own}

    plain = gpt(one, pair, 9, path_to_cache=cache)
    for own, words in ((1, []), (1, []), ([2, {"3": None}], ["own was 1"]), ([2, {"3": None}], [])):
        Own.own = own
        _, messages = heard(with_class, Own, plain)
        assert len(messages) == len(words)
        assert all(word in message for word, message in zip(words, messages, strict=True))
    Own.own = np.arange(3)
    with pytest.raises(TypeError, match="JSON"):
        with_class(Own, plain)


# -- what a start finds ----------------------------------------------------------------------------


def test_what_a_start_finds_wrong_is_rebuilt(one, pair, wanted, cache, builds):
    """To the same bytes, with one warning, which says why; the next job finds the cache whole.

    No manifest is no reason to warn: so are upstream's caches, and those being written.
    """
    start(one, pair, cache)
    before = files_of(cache)
    text = file_of(cache, "-manifest.json").read_bytes()
    manifest = json.loads(text)
    other_facts = manifest | {"facts": [1] * len(manifest["facts"])}
    array = file_of(cache, "sample_index.npy").read_bytes()
    wrong = [  # file, its content, a word of the warning
        ("manifest.json", None, None),
        ("manifest.json", text[:-1], "JSON"),
        ("manifest.json", b"null", "NoneType"),
        ("manifest.json", json.dumps(other_facts).encode(), "damaged"),
        ("sample_index.npy", array[:-5], "sample_index.npy"),
        ("document_index.npy", None, "document_index.npy"),
    ]
    for file, content, word in wrong:
        replace_file(file_of(cache, file), content)
        builds.reset_mock()
        _, messages = start(one, pair, cache)
        assert len(messages) == (word is not None), file
        for message in messages:
            assert re.search(f"is rebuilt: .*{word}", message), message
        assert files_of(cache) == before, file
        found, messages = cached(one, pair, cache)
        assert messages == [], file
        same_arrays(found, wanted)
        assert builds.call_count == 1, file


DOCS = random_docs(np.random.default_rng(5), most=40) * 3
REGENERATED = [  # documents, has the .idx the time of the old one?, a word of the warning
    ([[1, 2, 3]] * 20, True, "documents"),
    (DOCS[::-1], True, "idx_ends"),
    (DOCS, False, "idx_mtime_ns"),
]


@pytest.mark.parametrize("docs, same_time, word", REGENERATED)
def test_regenerated_data_make_a_cache_stale(one, tmp_path, cache, docs, same_time, word):
    """Upstream: the key is the path and the config, so the old indices are used."""
    corpus = mk(one, tmp_path / "p", DOCS)
    cached(one, corpus, cache)
    time_ns = os.stat(f"{corpus}.idx").st_mtime_ns if same_time else 1
    mk(one, corpus, docs)
    os.utime(f"{corpus}.idx", ns=(time_ns, time_ns))
    found, [message] = cached(one, corpus, cache)
    assert word in message
    same_arrays(found, cached(one, corpus, f"{cache} of the new")[0])
    again, messages = cached(one, corpus, cache)
    same_arrays(again, found)
    assert messages == []


def test_a_cache_of_data_that_were_regenerated_while_they_were_open(one, pair, cache):
    """It is of the old data: nobody takes it for one of the new."""
    old = one.IndexedDataset(pair)
    mk(one, pair, [[1] * 20] * len(old))
    cfg = config(one, ([pair], None), path_to_cache=cache)
    one.GPTDataset(old, pair, np.arange(4, dtype=np.int32), 20, one.Split.train, cfg)
    found, [message] = cached(one, pair, cache, 20)
    assert "idx_" in message
    same_arrays(found, cached(one, pair, f"{cache} of the new", 20)[0])


@linux
def test_what_a_second_start_opens_and_reads(one, tmp_path, cache, builds, monkeypatch):
    """Of each corpus the .idx and the .bin, which are mapped; of each dataset its manifest.

    No array of an index, and no token; whatever is opened is opened once, and no thread is started.
    """
    prefixes = []
    for name in "abc":
        prefixes.append(mk(one, tmp_path / name, [[1] * 9] * 40))
    fields = {"path_to_cache": cache, "split": "8,1,1", "reset_position_ids": True}
    cfg = config(one, (prefixes, [1, 2, 3]), **fields)
    quiet(build, one, [60, 8, 8], cfg)
    builds.reset_mock()
    opened = []

    def note(path, *arguments, **options):
        opened.append(os.path.basename(os.fspath(path)))
        return real_open(path, *arguments, **options)

    real_open = open
    never = mock.Mock(side_effect=AssertionError)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", note)
        patch.setattr(threading, "Thread", never)
        patch.setattr(one.IndexedDataset, "get", never)
        patch.setattr(one.IndexedDataset, "get_many", never)
        built = build(one, [60, 8, 8], cfg)
        one.build_pretraining_data_loader(built[0], 8, micro_batch_size=2)
    assert builds.call_count == 0
    pairs = [name for name in opened if not name.endswith("-manifest.json")]
    assert sorted(pairs) == ["a.bin", "a.idx", "b.bin", "b.idx", "c.bin", "c.idx"]
    manifests = [name for name in opened if name.endswith("-manifest.json")]
    assert len(manifests) == len(set(manifests)) == 3 * 3 + 3


def is_mapped(folder):
    """Has this process mapped a file of the folder?"""
    return str(folder) in pathlib.Path("/proc/self/maps").read_text()


@linux
@pytest.mark.parametrize("blend", [False, True], ids=["gpt", "blend"])
def test_a_start_maps_nothing_before_the_first_access(mm, tmp_path, cache, blend):
    """Nor does a blend, not even to see that its datasets have enough samples, nor a pickle.

    A dataset that nobody uses any more lets go of its files at once.
    """
    corpus = mk(mm, tmp_path / "p", [[1] * 30] * 3000)
    cfg = config(mm, ([corpus, corpus], [1, 2]) if blend else ([corpus], None), path_to_cache=cache)
    ks = [0, 77, -1, None]
    built = build(mm, [10_000, 0, 0], cfg)[0]
    assert not is_mapped(cache)
    wanted = built.batch(ks)
    assert is_mapped(cache)
    for part in built.datasets if blend else [built]:
        assert part.indices.nbytes > 10_000
    text = pickle.dumps(built)
    assert len(text) < 10_000, "in upstream all arrays travel to each worker"
    del built, part
    loaded = build(mm, [10_000, 0, 0], cfg)[0]
    again = pickle.loads(text)
    assert len(loaded) == len(again)
    assert not is_mapped(cache)
    for dataset in (loaded, again):
        same_samples(dataset.batch(ks), wanted)
    shutil.rmtree(cache)
    with pytest.warns(UserWarning, match="in memory"):
        same_samples(pickle.loads(text).batch(ks), wanted)


# -- what the first access finds -------------------------------------------------------------------


class RunsCode:
    """What unpickles it makes the file "ran"."""

    def __reduce__(self):
        return open, ("ran", "w")


def flipped(content, at):
    """One bit of a byte changed."""
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def wrong_arrays(content):
    """Other bytes of an array, of the same size where there are any; None: there is no file."""
    wrong = [None, content[:-5], npy(np.array([RunsCode()], object)).ljust(len(content))]
    for rng in cases(5):  # a bit somewhere, another one in the header
        wrong.append(flipped(content, int(rng.integers(len(content)))))
        wrong.append(flipped(content, int(rng.integers(128))))
    return wrong


def test_what_the_first_access_finds_wrong_is_built_in_memory(
    one, pair, wanted, tmp_path, cache, builds, monkeypatch
):
    """With one warning; nothing in it is run.  Also in the job that has saved the cache."""
    monkeypatch.chdir(tmp_path)
    saved, _ = start(one, pair, cache)
    content = file_of(cache, "document_index.npy").read_bytes()
    for case, wrong in enumerate(wrong_arrays(content)):
        shutil.rmtree(cache)
        saved, _ = start(one, pair, cache)
        found, messages = start(one, pair, cache)
        assert messages == []
        builds.reset_mock()
        replace_file(file_of(cache, "document_index.npy"), wrong)
        for ds in (saved, found):
            values, messages = heard(arrays, ds)
            messages = [message for message in messages if "document_index.npy" in message]
            assert len(messages) == 1, case
            assert "in memory" in messages[0], case
            same_arrays(values, wanted)
            same_arrays(arrays(pickle.loads(pickle.dumps(ds))), wanted)
        assert builds.call_count == 2, case
    assert not os.path.exists("ran")


@pytest.mark.parametrize("epochs, step", [(1, 1 << 16), (17, 1 << 21)])
def test_pages_that_a_power_loss_left_empty_are_noticed(one, tmp_path, cache, epochs, step):
    """32 KiB of zeros wherever they are, in a file of 1 MiB an epoch, of the old size and time.

    Above 16 MiB not all bytes are looked at, and yet enough for this.
    """
    corpus = mk(one, tmp_path / "p", np.ones((1 << 18, 1), np.int32))
    fields = {"n": 255 * epochs, "sequence_length": 1024}
    wanted = arrays(start(one, corpus, cache, **fields)[0])
    path = file_of(cache, "document_index.npy")
    content = path.read_bytes()
    assert (len(content) > 1 << 24) == (epochs == 17)
    last = len(content) - (32 << 10)
    for place in [0, *range(4096, last, step), last]:
        ds, messages = start(one, corpus, cache, **fields)
        assert messages == []
        replace_file(path, content[:place] + bytes(32 << 10) + content[place + (32 << 10) :])
        values, messages = heard(getattr, ds, "document_index")
        assert len(messages) == 1, place
        same(values, wanted[0])
        replace_file(path, content)


# -- errors of the build, of the disk and of the system --------------------------------------------


@pytest.mark.parametrize("error", [KeyError, OSError, KeyboardInterrupt])
def test_an_error_of_the_build_is_no_fault_of_the_cache(one, pair, cache, builds, error):
    """It is raised as it is, after one call; the warning is of what was wrong with the files."""
    start(one, pair, cache)
    os.truncate(file_of(cache, "sample_index.npy"), 100)
    before = files_of(cache)
    builds.reset_mock()
    reason = error("the build")
    builds.side_effect = reason
    with pytest.raises(error) as raised, pytest.warns(UserWarning, match="rebuilt"):
        gpt(one, pair, 50, path_to_cache=cache)
    assert raised.value is reason
    assert builds.call_count == 1
    assert files_of(cache) == before


def test_in_a_folder_that_cannot_be_made_the_arrays_stay_in_memory(one, pair, cache):
    """Below a regular file not even root can make a folder, so there is a warning."""
    wanted, _ = cached(one, pair, f"{cache} of its own")
    pathlib.Path(cache).write_text("")
    found, [message] = cached(one, pair, f"{cache}/below")
    assert "cannot be written" in message
    same_arrays(found, wanted)


@pytest.mark.parametrize("folder", [None, ""])
def test_a_blend_without_a_folder_stays_in_memory(one, pair, tmp_path, folder):
    """It belongs to no pair."""
    parts = [gpt(one, pair, 9, path_to_cache=str(tmp_path / "cache"))] * 2
    before = stamps(tmp_path)
    cfg = config(one, (["x"], None), path_to_cache=folder)
    blend, messages = heard(one.BlendedDataset, parts, [1, 2], 9, cfg)
    assert messages == []
    assert pairs_of(pickle.loads(pickle.dumps(blend))) == pairs_of(blend)
    assert pairs_of(blend) == blend_by_a_loop(blend.weights, 9)
    assert stamps(tmp_path) == before


@pytest.mark.parametrize("num_renames", [0, 3, 4])
def test_a_disk_that_is_full_in_the_middle(one, pair, cache, monkeypatch, num_renames):
    """The arrays stay in memory, are pickled whole, and the next job builds right ones."""
    cached(one, pair, cache)
    mk(one, pair, [[1] * 20] * 7)
    wanted, _ = cached(one, pair, f"{cache} of the new")
    full = OSError(errno.ENOSPC, "No space left on device")
    results = [mock.DEFAULT] * num_renames + [full] * 5
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", mock.Mock(wraps=os.replace, side_effect=results))
        ds, [*_, message] = start(one, pair, cache, 50)
    assert "No space left" in message
    for dataset in (ds, pickle.loads(pickle.dumps(ds))):
        same_arrays(arrays(dataset), wanted)
    names = os.listdir(cache)
    assert all(name.endswith((".npy", "description.txt")) for name in names), "nothing temporary"
    same_arrays(cached(one, pair, cache)[0], wanted)
    assert len(os.listdir(cache)) == 5


def die_in_the_middle(one, corpus, cache, num_renames):
    """A job that is killed while it gives the files of a cache their names."""
    rename = os.replace
    renamed = []

    def rename_or_die(source, target):
        if len(renamed) == num_renames:
            os.kill(os.getpid(), signal.SIGKILL)
        renamed.append(target)
        rename(source, target)

    os.replace = rename_or_die
    gpt(one, corpus, 50, path_to_cache=cache)


@linux
def test_a_job_that_is_killed_leaves_nothing_that_is_believed(one, pair, cache):
    """Wherever it was; the cache of other data that was there before is not believed, either."""
    cached(one, pair, cache)
    mk(one, pair, [[1] * 20] * 7)
    wanted, _ = cached(one, pair, f"{cache} of the new")
    jobs = []
    for num_renames in range(5):
        shutil.copytree(cache, f"{cache} {num_renames}")
        arguments = one, pair, f"{cache} {num_renames}", num_renames
        jobs.append(functools.partial(die_in_the_middle, *arguments))
    assert in_children(*jobs) == [-signal.SIGKILL] * 5
    for num_renames in range(5):
        found, _ = cached(one, pair, f"{cache} {num_renames}")
        same_arrays(found, wanted)
        again, messages = cached(one, pair, f"{cache} {num_renames}")
        same_arrays(again, wanted)
        assert messages == []


@linux
def test_too_many_open_files_are_no_fault_of_the_cache(one, pair, cache, monkeypatch):
    """Nothing is built again, at an access or at a start."""
    ds, _ = start(one, pair, cache, 50)
    arguments = one.IndexedDataset(pair), pair, np.arange(4, dtype=np.int32), 50, one.Split.train
    for number in (errno.EMFILE, errno.ENFILE):
        monkeypatch.setattr("builtins.open", mock.Mock(side_effect=OSError(number, "Too many")))
        with pytest.raises(OSError, match="Too many"):
            arrays(ds)
        with pytest.raises(OSError, match="Too many"):
            one.GPTDataset(*arguments, ds.config)


# -- several jobs at once --------------------------------------------------------------------------


def build_together(one, corpus, cache, n, barrier, wanted):
    """What one of several jobs does."""
    barrier.wait(60)
    same_arrays(cached(one, corpus, cache, n)[0], wanted)


@linux
@pytest.mark.parametrize("stale", [False, True])
def test_jobs_may_build_at_once(one, pair, cache, stale):
    """Over nothing, and over a cache of other data: all get right arrays; the files are whole."""
    if stale:
        cached(one, pair, cache)
        mk(one, pair, [[1] * 20] * 40)
    barrier = FORK.Barrier(4)
    jobs = []
    for n in (50, 50, 50, None):
        wanted, _ = cached(one, pair, f"{cache} {n}", n)
        jobs.append(functools.partial(build_together, one, pair, cache, n, barrier, wanted))
    assert in_children(*jobs) == [0, 0, 0, 0]
    assert len(os.listdir(cache)) == 10, "nothing temporary"
    assert cached(one, pair, cache)[1] == []


# ==============================================================================
# 13. Object storage
# ==============================================================================
#
# Three kinds of it: memory, a web server, and S3.

SECRET = "s3cret"


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """Serves the files of a folder, whole or a range of them."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet

    def log_message(self, *details):
        """Nothing."""

    def do_GET(self):
        server = self.server
        name = self.path.rpartition("/")[2]
        wanted = self.headers.get("Range", "")
        server.requests.append((self.command, name, wanted))
        path = pathlib.Path(server.folder, name)
        status = next(server.faults, None)
        if not isinstance(status, int) and not path.is_file():
            status = 404
        if isinstance(status, int):
            self.answer(status)
            return
        content = path.read_bytes()
        tag = hashlib.md5(content).hexdigest()
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        if found is None or status == "whole":
            self.answer(200, content, ETag=tag)
            return
        body = content[int(found[1]) : int(found[2]) + 1]
        if status == "short":
            body = body[1:]
        self.answer(206, body, is_cut=status == "cut", ETag=tag)

    do_HEAD = do_GET

    def answer(self, status, body=b"", is_cut=False, **headers):
        """Send an answer, of whose body only a half arrives if it is cut."""
        self.send_response(status)
        headers |= {"Content-Length": str(len(body)), "Accept-Ranges": "bytes"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if is_cut else body)
        self.close_connection = is_cut


class Storage:
    """A place on object storage: the URL that readers know, and the one that files are put to."""

    def __init__(self, root, target=None):
        self.root = root
        self._file_system, self._place = fsspec.core.url_to_fs(str(target or root))

    def put(self, prefix):
        """Copy a local pair -> the prefix of the copy."""
        name = os.path.basename(prefix)
        for extension in (".bin", ".idx"):
            self.put_file(f"{prefix}{extension}", f"{name}{extension}")
        return f"{self.root}/{name}"

    def put_file(self, path, name):
        """Copy one file -> the URL of the copy."""
        self._file_system.put_file(str(path), f"{self._place}/{name}")
        return f"{self.root}/{name}"

    def files(self):
        """The names of all that is there."""
        return {path.rpartition("/")[2] for path in self._file_system.find(self._place)}


@pytest.fixture
def no_pauses(tmp_path, monkeypatch):
    """The pauses that were asked for, which do not come; copies of .idx files below tmp_path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


@pytest.fixture
def bucket(no_pauses, monkeypatch):
    """Object storage in this process, empty."""
    file_system = fsspec.get_filesystem_class("memory")
    monkeypatch.setattr(file_system, "store", {})
    monkeypatch.setattr(file_system, "pseudo_dirs", [""])
    return Storage("memory://bucket")


def on_memory(name, function=None):
    """A patch that puts a function in the place of a method of memory://; its mock counts calls."""
    cls = fsspec.get_filesystem_class("memory")
    return mock.patch.object(cls, name, autospec=True, side_effect=function or getattr(cls, name))


@pytest.fixture
def web(no_pauses, tmp_path):
    """A web server that serves ranges, and writes nothing."""
    pytest.importorskip("aiohttp")
    folder = tmp_path / "web"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RangeHandler)
    server.daemon_threads = True
    server.socket.listen(256)  # a batch opens many at once; those over the limit wait for seconds
    server.folder = folder
    server.requests = []
    server.faults = iter([])  # of the next requests: a status, "cut", "short", "whole", or None
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    storage = Storage(f"http://127.0.0.1:{server.server_port}/bucket", folder)
    storage.server = server
    yield storage
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="session")
def s3_server():
    """The URL of an S3 server."""
    pytest.importorskip("s3fs", reason="pip install 'megatron-min[storage]'")
    moto = pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(no_pauses, s3_server, tmp_path, monkeypatch):
    """A bucket of its own on the S3 server."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # it pauses before its own retries
    bucket = re.sub("[^a-z0-9]", "-", tmp_path.name.lower())
    s3fs.S3FileSystem().mkdir(bucket)
    return Storage(f"s3://{bucket}/data")


@pytest.fixture(params=["bucket", "web", "s3"])
def storage(request):
    """Each kind of object storage."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def some_pair(one, tmp_path):
    """A local pair of 60 documents, some of them empty -> (prefix, documents)."""
    rng = np.random.default_rng(7)
    docs = [rng.integers(1, 900, n) for n in rng.integers(0, 30, 60)]
    return mk(one, tmp_path / "local" / "pair", docs, np.uint16), docs


@pytest.fixture
def numbers(one, web, tmp_path):
    """A remote pair of one document, the tokens 100 .. 119 (uint16), on the web server."""
    prefix = mk(one, tmp_path / "local" / "numbers", [range(100, 120)], np.uint16)
    return one.IndexedDataset(web.put(prefix))


# -- Reading -----------------------------------------------------------------------------------


def test_a_remote_pair_equals_the_local_one(one, storage, some_pair, no_pauses):
    """One by one or many at once; places may overlap, repeat and be empty."""
    prefix, docs = some_pair
    with pytest.raises(FileNotFoundError, match=re.escape(f"{storage.root}/pair.idx")):
        one.IndexedDataset(f"{storage.root}/pair")
    assert not one.IndexedDataset.exists(f"{storage.root}/pair")
    ds = one.IndexedDataset(storage.put(prefix), check=True)
    assert one.IndexedDataset.exists(f"{storage.root}/pair")
    assert no_pauses == []
    assert lists(ds[:]) == [doc.tolist() for doc in docs]
    pieces = [(3, 2, 4), (59, 0, 2), (-1, 0, 2), (3, 1, 1), (3, 2, 4), (3, 0, 0)]
    for (i, offset, length), found in zip(pieces, ds.get_many(pieces), strict=True):
        same(found, docs[i][offset : offset + length].astype(np.uint16))
        same(ds.get(i, offset, length), found)
    assert ds.get_many([]) == ds[5:5] == []
    with pytest.raises(IndexError):
        ds.get_many([(1, 0, 0), (0, 0, len(docs[0]) + 1)])


def new_ranges(web):
    """The ranges that the web server was asked for since the last call, sorted."""
    places = sorted(place for _, _, place in web.server.requests if place)
    web.server.requests.clear()
    return places


def test_ranges_are_exact(one, web, numbers, tmp_path):
    """The bytes that are asked for, each once, and none for what is empty."""
    new_ranges(web)
    numbers.get_many([(0, 2, 2), (0, 9, 1), (0, 2, 2), (0, 3, 0)])
    assert new_ranges(web) == ["bytes=18-19", "bytes=4-7"]
    numbers.get_many([])
    numbers.get(0, 2, 0)
    assert web.server.requests == []
    fields = {"path_to_cache": str(tmp_path / "cache"), "sequence_length": 8}
    train = build(one, [2, 0, 0], config(one, ([numbers.path_prefix], None), **fields))[0]
    new_ranges(web)
    assert [len(train[k]["tokens"]) for k in range(2)] == [8, 8]
    assert new_ranges(web) == ["bytes=0-17", "bytes=16-33"]


def test_a_batch_is_one_read(mm, bucket, some_pair, tmp_path):
    """All pieces of a batch, also of padding; of a blend one for each of its corpora."""
    prefix, docs = some_pair
    prefixes = [prefix, mk(mm, tmp_path / "local" / "second", docs[::-1], np.uint16)]
    fields = {"path_to_cache": str(tmp_path / "cache"), "sequence_length": 16}
    local = build(mm, [50, 0, 0], config(mm, (prefixes, [2, 3]), **fields))[0]
    prefixes = [bucket.put(prefix) for prefix in prefixes]
    remote = build(mm, [50, 0, 0], config(mm, (prefixes, [2, 3]), **fields))[0]
    ds = remote.datasets[0]
    for read, argument, wanted in (
        (ds.__getitem__, 5, 1),
        (ds.__getitems__, [3, None, 11, 0], 1),
        (ds.dataset.__getitem__, slice(1, 9), 1),
        (remote.batch, [*range(40), None], 2),
    ):
        with on_memory("cat_ranges") as calls:
            read(argument)
        assert calls.call_count == wanted, (read, argument)
    same_samples(remote.batch([*range(40), None]), local.batch([*range(40), None]))


def read_remote(ds, k):
    """What another thread or process does with a dataset."""
    return ds[k]["tokens"].tolist()


@linux
def test_remote_datasets_in_other_threads_and_processes(one, web, some_pair, tmp_path):
    fields = {"path_to_cache": str(tmp_path / "cache"), "sequence_length": 16}
    ds = build(one, [24, 0, 0], config(one, ([web.put(some_pair[0])], None), **fields))[0]
    wanted = [ds[k]["tokens"].tolist() for k in range(24)]
    for pool in (
        concurrent.futures.ThreadPoolExecutor(4),
        concurrent.futures.ProcessPoolExecutor(2, FORK),
    ):
        with pool:
            assert list(pool.map(read_remote, [ds] * 24, range(24))) == wanted
    assert read_remote(pickle.loads(pickle.dumps(ds)), 5) == wanted[5]


# -- Copies of .idx files ----------------------------------------------------------------------


def test_without_path_to_cache_indices_lie_beside_the_idx(one, bucket, some_pair, tmp_path):
    """A default beside the pair would be remote."""
    prefix = bucket.put(some_pair[0])
    for path, place in (
        (None, tmp_path / "home" / "megatron_min"),
        (str(tmp_path / "idx"), tmp_path / "idx"),
    ):
        cfg = config(one, ([prefix], None), object_storage_cache_path=path)
        first = build(one, [9, 0, 0], cfg)[0]
        manifest = f"{first.unique_description_hash}-GPTDataset-train-manifest.json"
        assert (place / "GPTDataset_indices" / manifest).exists()
        assert {path.suffix for path in place.iterdir() if path.is_file()} == {".idx"}
    assert bucket.files() == {"pair.bin", "pair.idx"}
    with pytest.raises(ValueError, match="path_to_idx_cache .* local"):
        one.ObjectStorageConfig(f"memory://me:{SECRET}@host/idx")
    with pytest.raises(ValueError, match="path_to_cache .* local"):
        build(one, [9, 0, 0], config(one, ([prefix], None), path_to_cache="memory://cache"))


def open_remote(one, place, folder):
    """Open a pair whose .idx is copied into this folder."""
    return one.IndexedDataset(place, object_storage_config=one.ObjectStorageConfig(folder))


def test_an_index_is_copied_once_for_each_state(one, storage, some_pair, tmp_path):
    prefix, docs = some_pair
    place = storage.put(prefix)
    inodes = []
    for _ in range(2):
        open_remote(one, place, tmp_path / "idx")
        [copied] = (tmp_path / "idx").iterdir()
        assert copied.read_bytes() == pathlib.Path(f"{prefix}.idx").read_bytes()
        inodes.append(copied.stat().st_ino)
    assert inodes[0] == inodes[1]
    swapped = [docs[1], docs[0], *docs[2:]]  # files of the same sizes
    assert place == storage.put(mk(one, tmp_path / "changed" / "pair", swapped, np.uint16))
    ds = open_remote(one, place, tmp_path / "idx")
    assert lists(ds[:2]) == [docs[1].tolist(), docs[0].tolist()]


def test_a_listing_that_fsspec_keeps_is_no_state(one, s3, some_pair):
    place = s3.put(some_pair[0])
    one.IndexedDataset(place)
    file_system, path = fsspec.core.url_to_fs(f"{place}.idx")
    file_system.find(s3.root)
    type(file_system)(skip_instance_cache=True).pipe_file(path, b"of another process")
    with pytest.raises(one.DatasetFormatError, match="file size.* 18"):
        one.IndexedDataset(place)


def test_two_prefixes_have_two_copies(one, web, some_pair, tmp_path):
    """Even where the storage says the same of both."""
    for name in ("pair", "other"):
        for extension in (".bin", ".idx"):
            web.put_file(f"{some_pair[0]}{extension}", f"{name}{extension}")
        open_remote(one, f"{web.root}/{name}", tmp_path / "idx")
    assert len(os.listdir(tmp_path / "idx")) == 2


@linux
def test_processes_may_copy_an_index_at_once(one, web, some_pair, tmp_path):
    place = web.put(some_pair[0])
    barrier = FORK.Barrier(4)

    def job():
        barrier.wait(60)
        open_remote(one, place, tmp_path / "idx")

    assert in_children(job, job, job, job) == [0] * 4
    [copied] = (tmp_path / "idx").iterdir()
    assert copied.read_bytes() == pathlib.Path(f"{some_pair[0]}.idx").read_bytes()


def test_an_index_that_changes_while_it_is_copied(one, bucket, some_pair, tmp_path):
    """No copy stays; the next opening finds the new one."""
    place = bucket.put(some_pair[0])
    cat_ranges = fsspec.get_filesystem_class("memory").cat_ranges

    def read_then_change(self, *arguments, **options):
        found = cat_ranges(self, *arguments, **options)
        bucket.put_file(f"{some_pair[0]}.idx", "pair.idx")
        return found

    with on_memory("cat_ranges", read_then_change):
        with pytest.raises(one.DatasetFormatError, match="pair.idx: .* copied"):
            open_remote(one, place, tmp_path / "idx")
    assert os.listdir(tmp_path / "idx") == []
    open_remote(one, place, tmp_path / "idx")


# -- Faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut", "short", 408, 429, 500])
def test_only_what_failed_is_asked_for_again(one, web, numbers, fault):
    web.server.faults = iter([fault])
    new_ranges(web)
    assert lists(numbers.get_many([(0, 0, 1), (0, 5, 2)])) == [[100], [105, 106]]
    found = new_ranges(web)
    assert found in (["bytes=0-1"] * 2 + ["bytes=10-13"], ["bytes=0-1"] + ["bytes=10-13"] * 2)


def test_an_opening_is_tried_again(one, web, numbers, no_pauses):
    """Whose requests fsspec calls "not found", whatever happens to them."""
    web.server.faults = itertools.repeat(503, 3)
    assert lists(one.IndexedDataset(numbers.path_prefix)) == [list(range(100, 120))]
    assert len(no_pauses) > 0


@pytest.mark.parametrize(
    "status, error, tries",
    [
        (503, OSError, 5),
        ("whole", OSError, 5),  # a server without ranges sends more than it is asked for
        (404, FileNotFoundError, 1),
        (401, PermissionError, 1),
        (403, PermissionError, 1),
    ],
)
def test_pauses_grow_and_end_in_an_error(web, numbers, no_pauses, status, error, tries):
    """What is not there, or may not be read, is said at once.  The error names the object."""
    web.server.requests.clear()
    web.server.faults = itertools.repeat(status)
    with pytest.raises(error, match=r"numbers\.bin: ") as caught:
        numbers.get(0, 2, 2)
    assert type(caught.value) is error
    assert len(web.server.requests) == len(no_pauses) + 1 == tries
    assert no_pauses == sorted(set(no_pauses))


def test_a_missing_package_for_a_storage_is_named(one, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # no other test reads gs://
    with pytest.raises(ImportError, match=r"gs://bucket/pair.idx.*\[storage\]"):
        one.IndexedDataset("gs://bucket/pair")
    with pytest.raises(ValueError, match="nonsense"):
        one.IndexedDataset("nonsense://bucket/pair")


# -- Credentials -------------------------------------------------------------------------------


def test_credentials_are_left_out(one):
    for text, wanted in (
        ("data/a@b?c", "data/a@b?c"),
        ("https://me:pass@word@host/a", "https://host/a"),
        ("of https://me:pw@a/x?y=1 and 'http://you:pw@b/z?w=2'", "of https://a/x and 'http://b/z'"),
        ("s3://key:pass/word@bucket/x", "s3://bucket/x"),
        ("http://host:8080/a@b", "http://host:8080/a@b"),
        (pathlib.Path("a/b"), "a/b"),
    ):
        assert one._hide_credentials(text) == wanted


@pytest.mark.parametrize("fault", ["torn", "outside", "refused", "folder", 403, 503])
@pytest.mark.parametrize("url", ["{root}/pair", "{web}/x?X-Amz-Signature=s3cret&to=/pair"])
def test_no_message_shows_a_credential(one, web, some_pair, url, fault, capsys):
    """Not even those of the errors that led to an error, as Python prints them."""
    web.put(some_pair[0])
    url = url.format(root=web.root.replace("://", f"://me:{SECRET}@"), web=web.root)
    if fault == "torn":
        os.truncate(web.server.folder / "pair.bin", 10)
    if fault == "refused":
        url = url.replace(str(web.server.server_port), "9")
    if isinstance(fault, int):
        web.server.faults = itertools.repeat(fault)
    with pytest.raises((OSError, ValueError, IndexError)) as caught:
        if fault == "folder":
            one.merge([url], f"{url}2")  # object storage is no place to write to
        one.IndexedDataset(url)[100]
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert SECRET not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)
    for name in ("verify", "inspect"):
        code, out, err = command(one, capsys, name, url)
        assert SECRET not in out + err
        assert code == (0 if fault in ("outside", "folder") else 1)


# ==============================================================================
# 14. The loader and its state
# ==============================================================================


# -- The batches of a loader -------------------------------------------------------------------


class Plain:
    """A subclass without methods of its own."""


class Marked:
    """A subclass's own samples: each has a mark."""

    def __getitem__(self, idx):
        return super().__getitem__(idx) | {"mark": 7}


class Shifted:
    """A reader with tokens of its own."""

    def get(self, *arguments):
        return super().get(*arguments) + 1


KINDS_OF_DATASET = {  # {kind: (its methods, do threads make its batches, where C does?)}
    "plain": (Plain, True),
    "not mapped": (Plain, True),
    "blend, not mapped": (Plain, True),
    "blend, of another config": (Plain, False),
    "numbers": (None, False),
    "marked": (Marked, False),
    "blend, marked": (Marked, False),
    "own reader": (Plain, True),
}


def dataset_of(mm, folder, kind):
    """A dataset of one of KINDS_OF_DATASET, of 14 samples or more."""
    if kind == "numbers":
        return Numbers(22)
    prefixes = []
    for name in "ab":
        docs = [np.arange(n) + ord(name) for n in range(1, 20)]
        prefixes.append(mk(mm, folder / name, docs, np.uint16))
    methods, _ = KINDS_OF_DATASET[kind]
    fields = {"mmap_bin_files": not kind.endswith("not mapped")}
    if kind.startswith("blend"):
        blend = build(mm, [22, 0, 0], config(mm, (prefixes, [1, 2]), **fields))[0]
        cfg = copy.copy(blend.config) if kind.endswith("config") else blend.config
        cls = type("Blend", (methods, mm.BlendedDataset), {})
        return cls(blend.datasets, blend.weights, blend.size, cfg)
    cls = type("Whole", (methods, mm.GPTDataset), {})
    dataset = build(mm, [22, 0, 0], config(mm, (prefixes[:1], None), **fields), cls)[0]
    if kind == "own reader":
        dataset.dataset = type("Reader", (Shifted, mm.IndexedDataset), {})(prefixes[0])
    return dataset


def same_batches(found, wanted, note=""):
    """Equal batches (or samples), their keys in the same order."""
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        same_samples(ours, theirs, (note, number))


@pytest.mark.parametrize("kind", KINDS_OF_DATASET)
def test_a_loader_yields_the_batches_of_the_plain_loader(mm, tmp_path, kind):
    """Whoever makes them: C in threads, or torch's DataLoader in processes."""
    methods, by_threads = KINDS_OF_DATASET[kind]
    by_threads = by_threads and mm.IMPLEMENTATION == "c"
    dataset = dataset_of(mm, tmp_path, kind)
    sampler = sampler_of(mm, "single", len(dataset), 0, 4, 0, 1, drop_last=False)
    wanted = list(mm.batches_of(dataset, sampler))
    assert len(wanted) == math.ceil(len(dataset) / 4)
    assert ("mark" in wanted[0]) == (methods is Marked)
    for num_workers in (0, 1):
        loader = loader_of(mm, dataset, num_workers=num_workers, drop_last=False)
        same_batches(loader, wanted, num_workers)
        assert loader.state_dict()["consumed_samples"] == len(dataset)
        assert loader.makes_batches == by_threads
        assert loader.num_threads == (num_workers if by_threads else 0)
        assert loader.num_workers == (0 if by_threads else num_workers)


def test_batches_are_pinned_where_there_is_a_gpu(mm, tmp_path, monkeypatch):
    """Here nothing can be pinned: what would be is replaced by 5."""
    monkeypatch.setattr(torch.cuda, "is_available", yes)
    monkeypatch.setattr(torch.Tensor, "pin_memory", mock.Mock(return_value=5))
    loader = loader_of(mm, dataset_of(mm, tmp_path, "plain"))
    assert loader.pin_memory
    if loader.makes_batches:  # else torch's DataLoader does it
        assert set(next(iter(loader)).values()) == {5}


def test_which_loader(mm, tmp_path):
    """None where there is no sample: a sampler would refuse total_samples."""
    prefixes = [mk(mm, tmp_path / name, [[1] * 9] * 20) for name in "ab"]
    built = build(mm, [8, 0, 0], config(mm, (prefixes, [1, 1]), split="8,1,1"))
    for kind in ("single", "cyclic"):
        assert loader_of(mm, built[0], dataloader_type=kind) is not None
        for nothing in (*built[1:], None):
            assert loader_of(mm, nothing, dataloader_type=kind) is None
    data = [1, 2]
    assert loader_of(mm, data, dataloader_type="external") is data
    shuffled = loader_of(mm, range(8), dataloader_type="cyclic", micro_batch_size=8)
    assert next(iter(shuffled)).tolist() == [4, 0, 7, 3, 2, 5, 1, 6]  # that of seed 0
    for field, value in (("dataloader_type", "odd"), ("num_workers", -1)):
        with pytest.raises(ValueError, match=field):
            loader_of(mm, data, **{field: value})
    sampler = mm.MegatronPretrainingSampler(8, 0, 4, 0, 1)
    loader = mm.PretrainingDataLoader(built[0], sampler, collate_fn=len)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert list(loader) == [4, 4], "torch makes the batches"


# -- Ahead of the training loop ----------------------------------------------------------------


def wait_until_threads_end(count):
    """Nobody waits for the threads of a loader, so they end a little later."""
    end = time.monotonic() + 20
    while threading.active_count() > count and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= count, "a thread is left"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "numbers"])
@pytest.mark.parametrize("order", ["single", "cyclic"])
def test_the_state_counts_the_batches_that_were_delivered(mm, tmp_path, num_workers, kind, order):
    """What was made ahead and not used is made again."""
    dataset = dataset_of(mm, tmp_path, kind)
    fields = {"dataloader_type": order, "seed": 2}
    whole = list(loader_of(mm, dataset, **fields))
    num_threads = threading.active_count()
    loader = loader_of(mm, dataset, num_workers=num_workers, **fields)
    iterator = iter(loader)
    found = [next(iterator), next(iterator)]
    del iterator
    state = loader.state_dict()
    assert state["consumed_samples"] == 8
    for resumed in (loader_of(mm, dataset, **fields), loader):
        resumed.load_state_dict(state)
        same_batches(found + list(resumed), whole)
    del loader, resumed
    wait_until_threads_end(num_threads)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_batches_are_made_only_a_few_ahead(c, tmp_path, num_workers):
    """Without workers, none: by the thread that asks for it."""
    dataset = dataset_of(c, tmp_path, "plain")
    make = dataset.batch
    begun = []
    makers = set()

    def make_and_note(indices):
        begun.append(indices)
        makers.add(threading.current_thread())
        return make(indices)

    dataset.batch = make_and_note
    ahead = num_workers + 1 if num_workers else 0
    loader = loader_of(c, dataset, micro_batch_size=1, num_workers=num_workers)
    for number, _ in enumerate(loader, 1):
        assert number <= len(begun) <= number + ahead
    assert sorted(begun) == [[k] for k in range(len(dataset))]
    assert (threading.current_thread() in makers) == (num_workers == 0)


def test_which_iterator_goes_on_where_a_state_was_taken(one):
    """The next one, also if it is only looked at.  One that runs ends with an error."""
    loader = loader_of(one, Numbers(64))
    running = iter(loader)
    for _ in range(4):
        next(running)
    state = loader.state_dict()
    next(running)
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="load_state_dict"):
        next(running)
    assert loader.state_dict() == state
    firsts = [next(iter(loader))["k"][0].item() for _ in range(2)]
    assert firsts == [16, 0]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["single", *SHUFFLED])
def test_of_two_iterators_the_newest_counts(one, kind, num_workers):
    """Each gives its own batches; the state is that of the newest, wherever the other one is.

    A pass in order starts at 0; a shuffled one goes on, and counts the samples of all turns.
    """
    whole = [batch["k"].tolist() for batch in loader_of(one, Numbers(64), **fields_of(kind))]
    loader = loader_of(one, Numbers(64), num_workers=num_workers, **fields_of(kind))
    older = iter(loader)
    found = [next(older)["k"].tolist()]
    newest = iter(loader)
    start = 0
    if kind in SHUFFLED:
        start = 1
    assert next(newest)["k"].tolist() == whole[start]
    found += [next(older)["k"].tolist() for _ in range(3)]
    assert found == whole[:4]
    assert loader.state_dict()["consumed_samples"] == 4 * (start + 1)
    rest = [batch["k"].tolist() for batch in newest]
    assert rest == whole[start + 1 :]
    assert loader.state_dict()["consumed_samples"] == 64
    assert len(list(loader)) == len(whole)
    assert loader.state_dict()["consumed_samples"] == 64 * (start + 1)


@pytest.mark.parametrize("kind, num_workers", [("plain", 0), ("plain", 2), ("not mapped", 0)])
def test_an_error_ahead_reaches_the_loop_at_its_batch(mm, tmp_path, kind, num_workers):
    """Those before it are handed over."""
    dataset = dataset_of(mm, tmp_path, kind)
    sampler = mm.MegatronPretrainingSampler(len(dataset) + 20, 0, 4, 0, 1)
    loader = mm.PretrainingDataLoader(dataset, sampler, num_workers)
    iterator = iter(loader)
    for _ in range(len(dataset) // 4):
        next(iterator)
    with pytest.raises(IndexError, match=f"samples of {dataset.dataset_path}") as caught:
        next(iterator)
    assert loader.state_dict()["consumed_samples"] == len(dataset) // 4 * 4
    # The traceback and this frame hold each other, and the loader holds torch's workers: torch
    # waits for ten seconds for those that the garbage collector ends.
    traceback.clear_frames(caught.tb)
    del iterator, loader


BEGIN_OF_SCRIPTS = """
import faulthandler, sys, threading
import megatron_min as mm

faulthandler.dump_traceback_later(60, exit=True)
config = mm.GPTDatasetConfig(1, 4, blend=([mm.toy_corpus(sys.argv[1])], None), split="1",
                             tokenizer=mm.ByteTokenizer(), create_attention_mask=False)
builder = mm.BlendedMegatronDatasetBuilder(mm.GPTDataset, [4000, 0, 0], bool, config)
dataset = builder.build()[0]
def loader_of():
    return mm.build_pretraining_data_loader(dataset, 0, micro_batch_size=1, num_workers=2)
"""
CYCLES_OF_LOADERS = """
for _ in range(300):
    cycle = [iter(loader_of())]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
print("done")
"""
# No pool can begin a batch then.
END_WHILE_A_THREAD_READS = """
has_begun = threading.Event()

def read():
    for batch in mm.cyclic_iter(loader_of()):
        has_begun.set()

threading.Thread(target=read, daemon=True).start()
has_begun.wait()
unfinished = iter(loader_of())
next(unfinished)
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("rest", [CYCLES_OF_LOADERS, *[END_WHILE_A_THREAD_READS] * 3])
def test_a_script_ends_without_a_traceback(tmp_path, rest):
    """Its code is not asked for: torch may abort where a daemon thread frees tensors at the end."""
    ran = python(BEGIN_OF_SCRIPTS + rest, tmp_path)
    assert ran.stdout == "done\n" and "Traceback" not in ran.stderr, ran.stderr


# -- The state: what it holds ------------------------------------------------------------------


def data_of_a_run(mm, folder, size=40):
    """A GPTDataset over three documents."""
    return gpt(mm, mk(mm, folder / "p", [[1] * 17, [2] * 9, [3] * 30]), size)


def state_of(mm, dataset, consumed, **fields):
    """The state after so many samples, as a file would keep it."""
    return json.loads(json.dumps(loader_of(mm, dataset, consumed, **fields).state_dict()))


def md5_of(tokens):
    """The digest of a probe."""
    return hashlib.md5(struct.pack(f"<{len(tokens)}q", *tokens)).hexdigest()


def test_the_past_of_the_toy_corpus_by_hand(mm, toy):
    """Samples 0 and 1 are bbbcc and ccccc: see the first test."""
    dataset = gpt(mm, toy, 3, sequence_length=4)
    state = state_of(mm, dataset, 2, micro_batch_size=2)
    probes = [[0, 1, 0, md5_of(b"bbbcc")], [1, 2, 1, md5_of(b"ccccc")]]
    past = {"sampler": {"kind": "single"}, "taken": [2]}
    past |= {"pair of corpus 0": [3, 13], "probes of corpus 0": probes}
    assert state == {"version": 5, "consumed_samples": 2, "past": json.dumps(past)}
    assert state_of(mm, dataset, 0)["past"] == "{}", "nothing was consumed"


def test_a_past_has_the_first_and_the_last_sample_and_some_between(one, tmp_path):
    """Of several corpora fewer of each, but two at least; all of a few."""
    prefixes = []
    for number in range(20):
        prefixes.append(mk(one, tmp_path / f"{number}", [[number] * 100] * 4))
    for used, wanted in ((1, 32), (3, 10), (20, 2)):
        cfg = config(one, (prefixes[:used], [1] * used))
        blend = build(one, [50 * used, 0, 0], cfg)[0]
        past = json.loads(state_of(one, blend, 50 * used)["past"])
        assert past["taken"] == [50] * used
        probed = [entry for key, entry in past.items() if key.startswith("probes")]
        assert len(probed) == used
        for probes in probed:
            samples = [probe[0] for probe in probes]
            assert len(samples) == wanted and [samples[0], samples[-1]] == [0, 49]
            gaps = np.diff(samples)
            assert gaps.max() - gaps.min() <= 1
    few = json.loads(state_of(one, data_of_a_run(one, tmp_path), 4)["past"])
    assert [probe[0] for probe in few["probes of corpus 0"]] == [0, 1, 2, 3]


def test_a_state_counts_on_from_the_last_one(one, corpora_of_runs):
    """And back to an earlier place: always the state of a loader that counts anew."""
    blend = data_of_run(one, corpora_of_runs, A_RUN_OF_STATES)
    loader = loader_of(one, blend)
    for consumed in (8, 20, 12, 40, 4):
        loader.load_state_dict(state_of(one, blend, consumed))
        assert loader.state_dict() == state_of(one, blend, consumed)


def test_a_state_goes_through_torchs_checkpoints_and_pickle(one, tmp_path):
    import torch.distributed.checkpoint as checkpoint

    dataset = data_of_a_run(one, tmp_path)
    old = loader_of(one, dataset, 8)
    fresh = loader_of(one, dataset)
    quiet(checkpoint.save, {"loader": old}, checkpoint_id=tmp_path / "saved", no_dist=True)
    quiet(checkpoint.load, {"loader": fresh}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert fresh.state_dict() == old.state_dict()
    torch.save(old.state_dict(), tmp_path / "state.pt")
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert fresh.state_dict() == pickle.loads(pickle.dumps(old.state_dict()))


# -- The state: of two random runs -------------------------------------------------------------
# The judge knows nothing of states: it reads the samples of both runs.


class ReversedOrder:
    """A subclass's own order."""

    def _build_document_sample_shuffle_indices(self):
        arrays = super()._build_document_sample_shuffle_indices()
        return *arrays[:2], arrays[2][::-1]


class Swapped:
    """A subclass's own samples: those of each two change places."""

    def __getitem__(self, idx):
        return super().__getitem__(min(idx ^ 1, len(self) - 1))


CHOICES_OF_RUNS = {  # {what two runs may differ in: its values}
    "folder": ["here", "here", "here", "there", "other tokens"],  # "there" are copies
    "corpora": ["ab", "ab", "ba", "abc", "a"],
    "methods": [None, None, None, None, Plain, ReversedOrder, Swapped],
    "random_seed": [1, 1, 1, 2],
    "sequence_length": [8, 8, 8, 9],
    "stable_order": [False, True],
    "add_extra_token_to_sequence": [True, True, True, False],
    "drop_last_partial_validation_sequence": [True, False],
    "split": [("train", "1,0,0"), ("train", "8,2,0"), ("train", "80,20,0"), ("valid", "4,6,0")],
    "size": [40, 41, 48, 96],
    "weights": [None, (1, 2, 2), (1, 2, 2), (2, 4, 4), (1, 3, 0)],
    "phases": [(), (), ((24, 0), (24, 1)), ((24, 1), (24, 0)), ((24, 0), (99, 2)), ((48, 0),)],
    "kind": ["single", "single", *KINDS_OF_ORDER],
    "sampler_seed": [0, 0, 0, 1],
    "layout": [(4, 1), (4, 1), (2, 2), (1, 4), (2, 1), (3, 1)],  # micro-batch size, ranks
}
WEIGHTS_OF_PHASES = [(1, 2, 0), (2, 1, 0), (1, 1, 1)]
FIELDS_OF_RUNS = list(CHOICES_OF_RUNS)[3:8]  # those of the config


@pytest.fixture(scope="session")
def corpora_of_runs(one, tmp_path_factory):
    """A folder of corpora, and of copies of them, and of corpora of the same lengths."""
    folder = tmp_path_factory.mktemp("runs")
    for name in "abc":
        rng = np.random.default_rng(ord(name))
        lengths = rng.integers(0, 30, 40)
        for place in ("here", "other tokens"):
            docs = [rng.integers(0, 2**30, length) for length in lengths]
            mk(one, folder / place / name, docs)
        mk(one, folder / "there" / name, one.IndexedDataset(folder / "here" / name)[:])
    return folder


def drawn(rng, key):
    """One of the values of CHOICES_OF_RUNS."""
    return CHOICES_OF_RUNS[key][rng.integers(len(CHOICES_OF_RUNS[key]))]


def data_of_run(mm, folder, run):
    """The dataset of a run."""
    cls = mm.GPTDataset
    if run["methods"] is not None:
        cls = type(run["methods"].__name__, (run["methods"], cls), {})
    prefixes = [str(folder / run["folder"] / name) for name in run["corpora"]]
    weights = run["weights"]
    if weights is not None:
        weights = list(weights[: len(prefixes)])
    fields = {name: run[name] for name in FIELDS_OF_RUNS}
    part, fields["split"] = run["split"]
    size = None if weights is None else run["size"]
    if run["phases"] and part == "train":
        fields["blend_phases"] = []
        for samples, number in run["phases"]:
            of_phase = list(WEIGHTS_OF_PHASES[number][: len(prefixes)])
            fields["blend_phases"].append((samples, of_phase))
        weights = None
        size = None
    cfg = config(mm, (prefixes, weights), **fields)
    return quiet(build, mm, [size, size, 0], cfg, cls)[mm.Split[part].value]


def loader_of_run(mm, dataset, run, consumed):
    """The loader of the last rank of a run."""
    micro, ranks = run["layout"]
    fields = {"micro_batch_size": micro, "data_parallel_size": ranks, "seed": run["sampler_seed"]}
    fields |= fields_of(run["kind"])
    return loader_of(mm, dataset, consumed, data_parallel_rank=ranks - 1, **fields)


def order_of_run(dataset, run, consumed):
    """(what its order is made with, the consumed samples in order, all samples of the past).

    None if no pass can start there.
    """
    micro, ranks = run["layout"]
    total = len(dataset)
    kind = run["kind"]
    if kind not in SHUFFLED:
        if consumed > total:
            return None
        return [kind], range(consumed), range(consumed)
    per_round = micro * ranks
    active = total - total % per_round
    if active == 0 or consumed % per_round:
        return None
    shuffled = active if kind == "sharded" else total - total % micro
    turn, done = divmod(consumed, active)
    made_with = [kind, run["sampler_seed"], shuffled, turn, done]
    if kind == "sharded":
        made_with.append(ranks)
    order = []
    for number in range(turn + 1):
        order += order_of_turn(kind, total, micro, ranks, run["sampler_seed"], number)
    return made_with, order[:consumed], range(shuffled)


def tokens_of(dataset, places, is_mixed):
    """{dataset of a blend: its samples, in the order of these places}; all in one, if mixed."""
    found = {}
    for k in places:
        sample = dataset[k]
        d = int(sample.get("dataset_id", 0))
        tokens = sample["tokens"].numpy().tobytes() + sample["labels"].numpy().tobytes()
        found.setdefault("all" if is_mixed else d, []).append((d, tokens))
    return found


def judge(runs, datasets, consumed):
    """(do both runs have one past, why, or why not)."""
    orders = [order_of_run(data, run, consumed) for data, run in zip(datasets, runs, strict=True)]
    if orders[1] is None:
        return False, "no start"
    (made_with, *places), (made_with_here, *places_here) = orders
    if made_with != made_with_here:
        return False, "sampler"
    is_equal = []
    for number, is_mixed in ((0, False), (1, made_with[0] in SHUFFLED)):
        before = tokens_of(datasets[0], places[number], is_mixed)
        after = tokens_of(datasets[1], places_here[number], is_mixed)
        is_equal.append(before == after)
    consumed_are_equal, past_is_equal = is_equal
    assert consumed_are_equal or not past_is_equal
    if not past_is_equal:
        return False, "samples"
    if any(run["methods"] for run in runs):  # a class that is not ours says more of itself
        said = FIELDS_OF_RUNS if runs[0]["split"][0] == "valid" else FIELDS_OF_RUNS[:4]
        for key in ["methods", "split", *said]:
            if runs[0][key] != runs[1][key]:
                return False, "class"
    return True, "equal"


@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_of_random_pairs_of_runs_a_state_fits_where_the_samples_are_equal(
    one, corpora_of_runs, count
):
    """Both ways: what is accepted is equal, and what is refused is not."""
    found = collections.Counter()
    for rng in cases(count):
        before = {key: drawn(rng, key) for key in CHOICES_OF_RUNS}
        after = dict(before)
        for key in rng.choice(list(CHOICES_OF_RUNS), rng.integers(4), replace=False):
            after[key] = drawn(rng, key)
        datasets = [data_of_run(one, corpora_of_runs, run) for run in (before, after)]
        micro, ranks = before["layout"]
        per_round = ranks if before["kind"] == "full_validation" else micro * ranks
        rounds = len(datasets[0]) // per_round
        if before["kind"] in SHUFFLED:
            rounds *= 2
        consumed = per_round * int(rng.integers(1, rounds + 1))
        state = json.dumps(loader_of_run(one, datasets[0], before, consumed).state_dict())
        is_accepted = True
        try:
            loader_of_run(one, datasets[1], after, 0).load_state_dict(json.loads(state))
        except ValueError:
            is_accepted = False
        is_equal, reason = judge((before, after), datasets, consumed)
        assert is_accepted == is_equal, (reason, before, after, consumed)
        found[reason] += 1
    assert found["equal"] > 0.2 * count * CASES
    assert found["samples"] > 0.1 * count * CASES
    assert found["sampler"] > 0


A_RUN_OF_STATES = {key: values[0] for key, values in CHOICES_OF_RUNS.items()}
A_RUN_OF_STATES |= {"weights": (1, 2, 2), "stable_order": True}
TWO_PHASES = {"phases": ((24, 0), (24, 1))}
OTHER_RUNS = {  # {case: (what differs in both runs, what differs in the next one, what is refused)}
    "a copy, of a subclass": ({"methods": Plain}, {"folder": "there"}, None),
    "a longer run": ({}, {"size": 96}, None),
    "a further corpus": (TWO_PHASES, {"corpora": "abc", "phases": ((24, 0), (99, 2))}, None),
    "corpora swapped": ({}, {"corpora": "ba"}, r"pair of corpus 0 \(b\)"),
    "other tokens": ({}, {"folder": "other tokens"}, r"sample 0 of corpus 0 \(a\) .* tokens"),
    "another order": ({}, {"methods": ReversedOrder}, "sample 0 of .* at sequence .* in"),
    "a subclass's own samples": ({}, {"methods": Swapped}, r"class of corpus 0 \(a\)"),
    "a corpus less": ({}, {"corpora": "a"}, "corpus 0 gave 8 samples in the state, 24 here"),
    "another seed of the sampler": ({"kind": "sharded"}, {"sampler_seed": 1}, "'seed': 1"),
    "other ranks, sharded": ({"kind": "sharded"}, {"layout": (2, 2)}, "'data_parallel_size': 2"),
    "other phases, shuffled": (
        TWO_PHASES | {"kind": "unsharded"},
        {"phases": ((24, 1), (24, 0))},
        "checksum of dataset_index",
    ),
}


@pytest.mark.parametrize("case", OTHER_RUNS)
def test_a_state_and_another_run(mm, corpora_of_runs, case):
    """Refused with a sentence that names what differs, and what to do; or the run goes on."""
    of_both, of_next, word = OTHER_RUNS[case]
    runs = [A_RUN_OF_STATES | of_both, A_RUN_OF_STATES | of_both | of_next]
    before, after = [data_of_run(mm, corpora_of_runs, run) for run in runs]
    state = loader_of_run(mm, before, runs[0], 24).state_dict()
    loader = loader_of_run(mm, after, runs[1], 0)
    if word is not None:
        with pytest.raises(ValueError, match=f"{word}.*stable_order=True.*strict=False"):
            loader.load_state_dict(state)
        assert loader.state_dict()["consumed_samples"] == 0, "nothing was changed"
        loader.load_state_dict(state, strict=False)
        assert loader.state_dict()["consumed_samples"] == 24
        return
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    indices = next(iter(copy.copy(loader.batch_sampler)))
    same_samples(next(iter(loader)), after.batch(indices))


def test_a_class_of_the_users_own_says_what_it_is(one):
    """Its identifiers, and made_from(), or its length where that says nothing."""

    def rows(made_from, count=12, seed=1):
        documents = np.arange(count, dtype=np.int32)
        cfg = config(one, random_seed=seed)
        dataset = numbers_class(one)(range(30), "x", documents, None, one.Split.train, cfg)
        dataset.made_from = mock.Mock(return_value=made_from)
        return dataset

    said = {"path": ["a", {"b": 1}]}
    for before, after, word in (
        (rows({}), rows({}), None),
        (rows(said), rows(said, count=13), None),
        (rows({}), rows({}, seed=2), "random_seed of corpus 0"),
        (rows({}), rows({}, count=13), "length of corpus 0"),
        (rows(said), rows({"path": ["a", {"b": 2}]}), "made_from of corpus 0"),
    ):
        state = state_of(one, before, 4)
        if word is None:
            loader_of(one, after).load_state_dict(state)
            continue
        with pytest.raises(ValueError, match=word):
            loader_of(one, after).load_state_dict(state)
    for value in (np.zeros(3), np.int64(3), {1, 2}, Tok()):
        with pytest.raises(TypeError, match="JSON"):
            state_of(one, rows({"rows": value}), 4)


def test_what_is_no_state_is_refused(one):
    """strict=False accepts another version, but no place where there is no sample."""
    loader = loader_of(one, Numbers(64))
    state = loader_of(one, Numbers(64), 16).state_dict()
    other = state | {"version": 4}
    for wrong in ({}, {"consumed_samples": 8}, other):
        with pytest.raises(ValueError, match="PretrainingDataLoader.*strict=False"):
            loader.load_state_dict(wrong)
    for place in (65, -1):
        with pytest.raises(ValueError, match="consumed_samples"):
            loader.load_state_dict(state | {"consumed_samples": place}, strict=False)
    assert loader.state_dict()["consumed_samples"] == 0
    loader.load_state_dict(other, strict=False)
    assert loader.state_dict() == state


# -- What a training loop needs beside it ------------------------------------------------------


def test_cyclic_iter_goes_on_over_one_empty_pass_and_not_over_two(one):
    """One may be empty, as at the end of a run; two in a row would never end."""
    ended = one.cyclic_iter(sampler_of(one, "single", 7, 6, 3, 0, 1))
    assert list(itertools.islice(ended, 3)) == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    passes = mock.MagicMock()
    passes.__iter__.side_effect = [iter(items) for items in ([], [1], [], [2], [], [])]
    numbers = one.cyclic_iter(passes)
    assert [next(numbers), next(numbers)] == [1, 2]
    with pytest.raises(ValueError, match="passes"):
        next(numbers)


def test_micro_batches_can_be_had_again(one):
    """Against a list and two places in it; a new iterator may go on with the state of the last."""
    for rng in cases(50):
        numbers = one.RerunDataIterator(range(20))
        start = place = read = 0
        for action in rng.choice(["next", "next", "next", "rewind", "advance", "resume"], 60):
            read = max(read, place)
            if action == "resume":
                state = numbers.state_dict()
                assert state["saved_microbatches"] == list(range(start, read))
                numbers = one.RerunDataIterator(range(read, 20))
                numbers.load_state_dict(state)
            elif action == "rewind":
                numbers.rewind()
                place = start
            elif action == "advance":
                numbers.advance()
                start = place
            elif place < 20:
                assert next(numbers) == place
                place += 1
            else:
                with pytest.raises(StopIteration):
                    next(numbers)
        assert list(numbers) == list(range(place, 20))


def test_samples_of_a_run_by_hand(one):
    """16 samples an evaluation: after 30, 60 and 90 steps of 100, and at the end."""
    run = {"global_batch_size": 8, "eval_interval": 30, "eval_iters": 2}
    for arguments, wanted in (
        ({"train_iters": 100}, (800, 4 * 16, 16)),
        ({"train_samples": 805}, (805, 4 * 16, 16)),
        ({"train_iters": 90}, (720, 4 * 16, 16)),
        ({"train_samples": 719}, (719, 3 * 16, 16)),  # 89 whole steps
        ({"train_iters": 10, "full_validation": True}, (80, None, 16)),
        ({"train_iters": 0}, (0, 16, 16)),
        ({"train_iters": 100, "skip_train": True}, (800, 16, 16)),
    ):
        assert one.get_train_valid_test_num_samples(**run | arguments) == wanted
    for wrong, word in (
        ({}, "train_iters"),
        ({"train_iters": 10, "train_samples": 80}, "train_iters"),
        ({"train_iters": 10, "eval_interval": 0}, "eval_interval"),
        ({"train_samples": 80, "eval_iters": -2}, "eval_iters"),
    ):
        with pytest.raises(ValueError, match=word):
            one.get_train_valid_test_num_samples(**run | wrong)


def test_the_batch_grows_in_equal_steps(one):
    """2 ranks of micro-batches of 4; upstream's rule is compared with it in the last sections."""
    for ramp, wanted in (  # {consumed samples: global batch size}
        (None, {0: 32, 10**9: 32}),
        ((16, 8, 100), {0: 16, 49: 16, 50: 24, 99: 24, 101: 32, 150: 32}),
        ((16, 8, 0), {0: 32}),
        ((32, 8, 100), {0: 32, 101: 32}),
    ):
        number = one.NumMicroBatches(32, 4, 2, ramp)
        assert number.get_current_global_batch_size() == wanted[0], "before any update()"
        for consumed, size in wanted.items():
            number.update(consumed)
            assert number.get_current_global_batch_size() == size, (ramp, consumed)
            assert number.get() == size // 8
    for arguments, word in (
        ((30, 4, 2, None), "30"),
        ((32, 0, 2, None), "micro_batch_size"),
        ((32, 4, 2, (16, 6, 100)), "equal"),
        ((32, 4, 2, (16, 4, 100)), "20"),
        ((32, 4, 2, (16, 8, -1)), "samples"),
        ((32, 4, 2, (16, 0, 100)), "increment"),
        ((32, 4, 2, (16, 8)), "rampup_batch_size"),
    ):
        with pytest.raises(ValueError, match=word):
            one.NumMicroBatches(*arguments)


# ==============================================================================
# 15. One error for every rank
# ==============================================================================


class Failing:
    """A step that raises an error, or returns this rank's own value if there is none."""

    def __init__(self, error=None, value=None):
        self.error = error
        self.value = value

    def __call__(self):
        if self.error is not None:
            raise self.error
        return self.value


ODD = "no such \udcff sample \U0001f600"
SHARED_ERRORS = [  # (error on one rank, class on every rank, its sentence after "rank R: ")
    (ValueError(ODD), ValueError, ODD),
    (FileNotFoundError(2, "No", "a.bin"), FileNotFoundError, "[Errno 2] No: 'a.bin'"),
    (ZeroDivisionError("by zero"), RuntimeError, "by zero (ZeroDivisionError)"),
    (UnicodeDecodeError("ascii", b"\xff", 0, 1, "no"), RuntimeError, "'ascii' codec can't decode"),
]


def an_error_on_one_rank_is_raised_on_all(job):
    """Of several, that of the lowest rank.  What works on all ranks returns on each its value."""
    for failing in range(job.world):
        for error, kind, words in SHARED_ERRORS:
            mine = None
            if job.rank == failing:
                mine = error
            elif job.rank > failing:
                mine = ValueError("not heard")
            with collectives() as sent, pytest.raises(kind) as caught:
                job.mm._on_every_rank(Failing(mine))
            assert sent == [("all_reduce", 8), ("broadcast_object_list", None)]
            assert type(caught.value) is kind
            assert str(caught.value).startswith(f"rank {failing}: {words}")
            assert caught.value.__cause__ is mine
    with collectives() as sent:
        assert job.mm._on_every_rank(Failing(value=job.rank)) == job.rank
    assert sent == [("all_reduce", 8)]


def an_error_stays_in_its_group(job):
    """The ranks of a group, of which R is the number in the whole job."""
    pairs = job.groups((2, 1, 1)).group("tp")
    error = ValueError("broken") if job.rank == job.world - 1 else None
    if job.rank < job.world - 2:
        assert job.mm._on_every_rank(Failing(error, "well"), pairs) == "well"
    else:
        with pytest.raises(ValueError, match=f"^rank {job.world - 1}: broken$"):
            job.mm._on_every_rank(Failing(error), pairs)


def consumed_samples_are_compared(job):
    job.mm.check_data_consistency(64)
    words = f"from 64 to {63 + job.world} .*rank {job.rank} has {64 + job.rank}"
    with pytest.raises(ValueError, match=words):
        job.mm.check_data_consistency(64 + job.rank)
    pairs = job.groups((2, 1, 1)).group("tp")
    job.mm.check_data_consistency(job.rank // 2, pairs)


# -- The builder on ranks ----------------------------------------------------------------------


def built_tokens(job, cache, is_built_on_rank=yes, prefixes=("a", "b")):
    """Build a blend of corpora, with a cache of this name -> each split's tokens, or None."""
    prefixes = [str(job.folder / prefix) for prefix in prefixes]
    cache = str(job.folder / cache)
    cfg = config(job.mm, (prefixes, (1, 3)), split="9,1,0", path_to_cache=cache)
    cls = job.mm.GPTDataset
    builder = job.mm.BlendedMegatronDatasetBuilder(cls, [60, 6, 0], is_built_on_rank, cfg)
    tokens = []
    for dataset in builder.build():
        if dataset is not None:
            dataset = [sample["tokens"].tolist() for sample in dataset]
        tokens.append(dataset)
    return tokens


def caches_are_shared_or_of_ones_own(job):
    """Upstream: only global rank 0 builds, so a cache a node fails."""
    counted = mock.patch.object(job.mm, "build_sample_idx", wraps=job.mm.build_sample_idx)
    with counted as calls:
        shared = built_tokens(job, "shared")
    assert calls.call_count == (4 if job.rank == 0 else 0), "two corpora in two splits"
    train, valid, test = shared
    assert len(train) == 60
    assert len(valid) == 7, "ceil(6 / 4) + ceil(6 * 3 / 4)"
    assert not test
    assert built_tokens(job, "shared") == shared, "again"
    assert built_tokens(job, f"own {job.rank}") == shared
    if job.rank == 0:  # the others have read what they built before
        torn = min((job.folder / "shared").glob("*-document_index.npy"))
        os.truncate(torn, torn.stat().st_size - 1)
    with counted as calls:
        assert quiet(built_tokens, job, "shared") == shared, "a file of another size"
    assert calls.call_count == (1 if job.rank == 0 else 0)
    for wanting in range(job.world):
        is_wanted = job.rank == wanting
        found = built_tokens(job, f"by {wanting}", Failing(value=is_wanted))
        assert found == (shared if is_wanted else [None, None, None])


def a_failed_build_is_raised_on_all(job):
    """Upstream: the other ranks wait for ten minutes.  Afterwards the ranks can build again."""
    for failing in range(job.world):
        prefixes = ("a", "b")
        if job.rank == failing:  # a file that this rank alone does not see
            prefixes = ("a", "none")
        with pytest.raises(FileNotFoundError, match=rf"^rank {failing}: .*none\.idx"):
            built_tokens(job, f"broken {failing}", prefixes=prefixes)
        cannot_tell = Failing(ZeroDivisionError() if job.rank == failing else None, True)
        with pytest.raises(RuntimeError, match=f"^rank {failing}: .*ZeroDivisionError"):
            built_tokens(job, "shared", cannot_tell)
        assert built_tokens(job, "shared")[0]


@two_or_four_ranks
def test_errors_on_ranks(run_on_ranks, world):
    scenarios = [
        an_error_on_one_rank_is_raised_on_all,
        an_error_stays_in_its_group,
        consumed_samples_are_compared,
        caches_are_shared_or_of_ones_own,
        a_failed_build_is_raised_on_all,
    ]
    run_on_ranks(world, scenarios)


def test_the_device_of_a_group_is_that_of_its_backends(one, group, monkeypatch):
    """A job of several backends, or of none that is named, sends batches between GPUs."""
    for backends, device in (("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo,cuda:gloo", "cpu")):
        found = mock.Mock(return_value=backends)
        monkeypatch.setattr(torch.distributed, "get_backend_config", found)
        assert one._device_of_group() == torch.device(device)


@pytest.mark.parametrize("in_a_job", [False, True])
def test_without_other_ranks_an_error_is_passed_on_as_it_is(one, in_a_job, request):
    if in_a_job:
        request.getfixturevalue("group")
    error = ZeroDivisionError("by zero")
    with pytest.raises(ZeroDivisionError) as caught:
        one._on_every_rank(Failing(error))
    assert caught.value is error
    assert one._on_every_rank(Failing(value=5)) == 5
    one.check_data_consistency(5)


# ==============================================================================
# 16. The C kernels
# ==============================================================================
# What the kernels compute is tested in sections 4 to 6, too; here is what needs their arguments.


@pytest.fixture(scope="session")
def c():
    """The module with the C kernels."""
    if "c" not in IMPLEMENTATIONS:
        pytest.skip("the C kernels are switched off")
    return copy_of_module("c")


# -- the switch ------------------------------------------------------------------------------------


SWITCHES = [  # MEGATRON_MIN_C, what the import of C raises, and what comes of it: words of warnings
    ("1", "ModuleNotFoundError", "an error"),
    ("1", "ImportError", "an error"),
    ("0", "ImportError", []),
    (None, "ModuleNotFoundError", []),
    (None, "ImportError", ["torn"]),
]


@pytest.mark.parametrize("setting, error, wanted", SWITCHES)
def test_without_a_build(monkeypatch, tmp_path, setting, error, wanted):
    """=1 asks for C, so its absence is an error; unset goes without, and warns of a broken one."""
    (tmp_path / "_megatron_min.py").write_text(f"raise {error}('torn')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "_megatron_min", raising=False)
    monkeypatch.delenv("MEGATRON_MIN_C", raising=False)
    if setting is not None:
        monkeypatch.setenv("MEGATRON_MIN_C", setting)
    path = str(HERE / "megatron_min.py")
    if wanted == "an error":
        with pytest.raises(ImportError, match="torn"):
            runpy.run_path(path)
        with pytest.raises(SystemExit, match="MEGATRON_MIN_C=1 asks for the C kernels: torn"):
            runpy.run_path(path, run_name="__main__")  # one sentence, and no traceback
        return
    with warnings.catch_warnings(record=True) as caught:
        module = runpy.run_path(path)
    assert module["IMPLEMENTATION"] == "python"
    assert [str(warning.message).rpartition(" ")[2] for warning in caught] == wanted


# -- C gives what the definitions give -------------------------------------------------------------


def random_ids(rng, dtype):
    """Ids of which most fit a dtype, or all, as an array of another dtype, a list, or a tensor."""
    limits = np.iinfo(dtype)
    edges = [limits.min, limits.max, 0]
    if rng.random() < 0.3:
        edges += [limits.min - 1, limits.max + 1]
    ids = [int(edge) for edge in rng.choice(np.array(edges, object), rng.integers(1200))]
    if rng.random() < 0.3:
        return ids
    source = np.dtype(rng.choice(["b1", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f8"]))
    if source.kind in "iu":
        ids = [min(max(i, np.iinfo(source).min), np.iinfo(source).max) for i in ids]
    ids = np.array(ids, object).astype(source)
    ways = [ids, ids[::2], ids[:, None], ids.astype(source.newbyteorder()), torch.from_numpy(ids)]
    return ways[rng.integers(len(ways))]


def test_c_encodes_what_the_definition_encodes(c, one, monkeypatch):
    """All that C can take: it is asked for nothing that the definition then has to do again."""
    refused = 0
    for rng in cases(300):
        dtype = np.dtype(INTEGERS[rng.integers(len(INTEGERS))])
        values = random_ids(rng, dtype)
        try:
            wanted = one._encode_tokens(values, dtype)
        except ValueError as error:
            refused += 1
            with pytest.raises(ValueError, match=re.escape(str(error))):
                c._encode_tokens(values, dtype)
        else:
            assert c._encode_tokens(values, dtype) == wanted
    assert refused > 0
    ids = [0] * 600 + [2**16]
    with pytest.raises(ValueError, match="65536 at 600 does not fit uint16"):
        c._encode_tokens(ids, np.dtype(np.uint16))
    monkeypatch.setattr(c._encode_tokens, "__wrapped__", None)
    for values in ([1, 2], int32(1, 2), torch.tensor([1, 2])):
        assert c._encode_tokens(values, np.dtype(np.uint16)) == b"\1\0\2\0"


def test_rows_of_64_bits(c):
    """As a stream of 2**31 documents has them."""
    call = toy_call("build_sample_idx") | {"sample_index": np.zeros((4, 2), np.int64)}
    call_c(c, "build_sample_idx", call)
    assert call["sample_index"].tolist() == [[0, 0], [1, 0], [2, 1], [2, 5]]


@linux
def test_shuffles_beyond_2_32_items_are_numpys(c, tmp_path):
    """There a draw is two words.  The file has a hole of this size."""
    call = toy_call("shuffle") | {"array": np.memmap(tmp_path / "a", "i4", "w+", shape=2**32 + 1)}
    assert is_refused(c, "shuffle", call)


@pytest.mark.parametrize("dtype", ["i4", "u4", "i8"])
def test_shuffle_goes_on_where_numpy_would(c, dtype):
    """From any state, and leaves the state behind that numpy would leave."""
    for rng in cases(10):
        state = np.random.RandomState(int(rng.integers(2**32)))
        state.bytes(4 * int(rng.integers(700)))
        state.normal(size=rng.integers(2))  # of two numbers that are made one is kept
        ours = np.arange(rng.choice([4096 + rng.integers(1500), 140_000])).astype(dtype)
        theirs = ours.copy()
        other = copy.deepcopy(state)
        c.shuffle(ours, state)
        other.shuffle(theirs)
        same(ours, theirs)
        assert repr(state.get_state()) == repr(other.get_state())


ENTRIES = ["sequence_lengths", "sequence_pointers"]
FLAGS = ["create_attention_mask", "reset_attention_mask", "reset_position_ids", "eod_mask_loss"]
FLAGS += ["inter_document_masking", "allow_ambiguous_pad_tokens"]
FLAGS += ["drop_last_partial_validation_sequence"]


def random_datasets(mm, folder, seed):
    """A GPTDataset of a small random corpus on a random config, and a blend of it with itself."""
    rng = np.random.default_rng([16, seed])
    dtype = INTEGERS[rng.integers(len(INTEGERS))]
    fields = {flag: bool(rng.random() < [0, 0.5, 0.8][seed % 3]) for flag in FLAGS}
    if fields["inter_document_masking"] or not fields["create_attention_mask"]:
        fields["reset_attention_mask"] = False
    fields["add_extra_token_to_sequence"] = bool(rng.integers(2))
    fields["tokenizer"] = Tok(eod=int(rng.integers(0, 5)))
    if seed % 3:  # else the ids are looked at once only
        fields["tokenizer"].pad = int(rng.integers(-1, 4))
    lowest = 0
    if seed % 2:  # -1 pads where a tokenizer has no pad
        lowest = -1 if np.dtype(dtype).kind == "i" else np.iinfo(dtype).max - 5
    docs = [np.add(doc, lowest) for doc in random_docs(rng, most=8, longest=9, vocab=5)]
    prefix = mk(mm, folder / str(seed), docs, dtype)
    fields["sequence_length"] = int(rng.integers(1, 14))
    split = str(rng.choice(["train", "valid"]))
    ds = quiet(gpt, mm, prefix, int(rng.integers(1, 20)), split, **fields)
    return [ds, mm.BlendedDataset([ds, ds], [len(ds)] * 2, None, ds.config)] if len(ds) else []


def damage(ds, seed):
    """Change one number in the index arrays of a dataset or in the entries of its .idx."""
    rng = np.random.default_rng([61, seed])
    arrays = {name: np.array(getattr(ds, name)) for name in INDEX_ARRAYS}
    if rng.integers(2):  # what C takes for more than 2**31 documents or 2**32 samples
        arrays["sample_index"] = arrays["sample_index"].astype(np.int64)
        arrays["shuffle_index"] = arrays["shuffle_index"].astype(np.int64)
    entries = {name: np.array(getattr(ds.dataset, name)) for name in ENTRIES}
    values = (arrays | entries)[rng.choice(INDEX_ARRAYS + ENTRIES)].reshape(-1)
    at = rng.integers(values.size)
    if rng.random() < 0.7:  # one too far is what a check is most easily wrong about
        step = rng.choice([-2, -1, 1, 2])
        values[at : at + 1] += np.array([step]).astype(values.dtype)  # which may wrap around
    else:
        others = np.array([-1, 0, 1, 50, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)])
        values[at] = rng.choice(others).astype(values.dtype)
    for name, array in arrays.items():
        setattr(ds, name, array)
    vars(ds.dataset).update(entries)


def outcome(function, argument):
    """The samples or batches that a call returns, and its error or its warnings as text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = function(argument)
        except Exception as error:
            return [], f"{type(error).__name__}: {error}"
    messages = sorted({str(warning.message) for warning in caught})
    return found if isinstance(found, list) else [found], "\n".join(messages)


def test_c_reads_what_the_definitions_read(c, one, tmp_path):
    """From whole and from damaged indices; the same warnings and errors."""
    errors = 0
    for seed in range(round(60 * CASES)):
        ours = random_datasets(c, tmp_path, seed)
        theirs = random_datasets(one, tmp_path, seed)
        if theirs and seed % 4:
            damage(ours[0], seed)
            damage(theirs[0], seed)
        rng = np.random.default_rng(seed)
        for mine, other in zip(ours, theirs, strict=True):
            n = len(other)
            indices = [*rng.integers(-n, n, 5).tolist(), None]
            calls = [("__getitem__", i) for i in (*indices, n, -n - 1, 2**70)]
            for name in ("__getitems__", "batch"):
                calls += [(name, indices), (name, [*indices, n]), (name, [2**70])]
            for name, argument in calls:
                note = seed, name, argument
                samples, text = outcome(getattr(mine, name), argument)
                wanted, wanted_text = outcome(getattr(other, name), argument)
                assert text == wanted_text, note
                same_batches(samples, wanted, note)
                errors += "wanted a place in .bin" in text or "rebuild the cache" in text
    assert errors > 0


# -- hostile arguments: an error from both implementations, never a crash --------------------------


def read_only(values):
    values = values.copy()
    values.flags.writeable = False
    return values


NUMBERS = np.zeros(4, np.int64)
HALF = NUMBERS.view(np.int16)[:4]
OUTPUTS = {"dataset_index": np.zeros(4, np.int16), "dataset_sample_index": NUMBERS}
BLENDS = {  # {function: good arguments}
    "build_blending_indices": OUTPUTS
    | {"weights": np.array([0.25, 0.75]), "num_datasets": 2, "size": 4},
    "build_exhaustive_blending_indices": OUTPUTS | {"sizes": np.array([1, 3]), "num_datasets": 2},
}
HOSTILE = {  # {argument: what is refused}
    "dataset_index": [np.zeros(4, np.int32), [0] * 4, np.zeros(3, np.int16), HALF],
    "dataset_sample_index": [np.zeros((4, 1), np.int64), NUMBERS[:3], read_only(NUMBERS)],
    "weights": [[0.5, math.nan], [0.5, math.inf], [0.5, -0.5], [1.0], ["a", "b"]],
    "sizes": [[4], np.array([2.5, 1.5]), [5, -1], [3, 2], [2**62, 2**62]],
    "num_datasets": [0, -1, 3, 2.0],
    "size": [5, -1, 2.5],
}


@pytest.mark.parametrize("name", BLENDS)
def test_hostile_arguments_raise(mm, name):
    """Upstream crashes."""
    for argument in BLENDS[name]:
        for value in HOSTILE[argument]:
            with pytest.raises((TypeError, ValueError)):
                getattr(mm, name)(**BLENDS[name] | {argument: value})


# -- what a function of C is given is checked before it is trusted ---------------------------------
#
# A call is the arguments of a function of _megatron_min, by name and in order.

FILLED = {  # {function: how many arrays it fills, its first arguments}
    "encode_tokens": 0,
    "build_sample_idx": 1,
    "shuffle": 2,
    "build_blend": 2,
    "read_samples": 7,
}


def call_c(c, name, call):
    """Call a function of C, which takes no keywords."""
    return getattr(c._megatron_min, name)(*call.values())


def toy_call(name):
    """A good call for the toy corpus in three samples of 4 tokens, or for a blend of two.

    In front and behind of each array lies a copy of an item, which would do as one more.
    """
    call = toy_arguments(name)
    for key, value in call.items():
        if isinstance(value, np.ndarray):
            call[key] = np.concatenate([value[:1], value, value[-1:]])[1:-1]
    return call


def toy_arguments(name):
    if name == "build_blend":
        limits = np.array([1.0, 3.0])
        return OUTPUTS | {"weights": np.array([0.25, 0.75]), "limits": limits, "size": 4}
    if name == "encode_tokens":
        return {"values": int32(*b"aaaabbbcccccc"), "kind": "u", "itemsize": 2}
    if name == "shuffle":
        key = np.random.RandomState(0).get_state()[1].copy()
        return {"array": np.arange(9), "key": key, "pos": 600}
    sizes = int32(4, 3, 6)
    documents = int32(0, 1, 2)
    if name == "build_sample_idx":
        call = {"sample_index": np.zeros((4, 2), np.int32), "sizes": sizes}
        call |= {"document_index": documents, "sequence_length": 4}
        return call | {"add_extra_token": 1, "last_token": 13}
    call = {key: np.zeros((3, 4), np.int64) for key in ("tokens", "labels")}
    call |= {"loss_mask": np.zeros((3, 4), np.float32), "position_ids": np.zeros((3, 4), np.int64)}
    call |= {"cu_seqlens": np.zeros((3, 5), np.int32), "max_seqlen": np.zeros(3, np.int32)}
    call |= {"attention_mask": np.zeros((3, 1, 4, 4), bool)}
    call |= {"places": np.arange(3), "wanted": np.array([0, -2, 2])}
    call |= {"items": int32(*b"aaaabbbcccccc"), "pointers": np.array([0, 16, 28])}
    call |= {"lengths": sizes, "document_index": documents}
    call |= {"sample_index": int32(0, 0, 1, 0, 2, 1, 2, 5).reshape(4, 2)}
    call |= {"shuffle_index": np.arange(3, dtype=np.uint32), "extra": 1, "pad": -1, "eod": 0}
    return call | {"by_eod": True, "mask_loss": True, "reset_mask": True}


OUT_OF_RANGE = {  # {function: {argument: values that it refuses in the toy call}}
    "encode_tokens": {
        "values": [int32(-1), int32(2**16), [0, 2**16], [2**70], [True], ["a"], [1.5], (1, 2)],
        "kind": ["f", "u2", "", "\0", "\u0175", None, 117],
        "itemsize": [0, -1, 3, 9, 2**31],
    },
    "build_sample_idx": {
        "sample_index": [np.zeros((4, 3), np.int32), np.zeros((0, 2), np.int32)],
        "sizes": [int32(8, -1, 6)],
        "document_index": [int32(0, 3, 2), int32(-1, 1, 2), int32(0, 1)],
        "sequence_length": [0, -1, 2**62, 2**63],
        "add_extra_token": [-1, 2],
        "last_token": [-5, 9, 14, 2**62],  # of the row before, of the next, ...
    },
    "shuffle": {"pos": [-1, 625, 2**31], "array": [b"01234567", None]},
    "build_blend": {
        "size": [-1, 5, 2**62],
        "weights": [np.array([1, 1]), np.array([0.5, math.nan]), np.array([0.5, math.inf])],
        "limits": [np.array([1.0, 2.0]), np.array([-1.0, 4.0]), np.array([math.nan, 4.0])],
    },
    "read_samples": {
        "tokens": [None, np.zeros((3, 0), np.int64)],
        "cu_seqlens": [None],  # without max_seqlen, and that without this
        "max_seqlen": [None],
        "places": [np.array([0, 1])],
        "items": [np.zeros(13, np.uint32), np.zeros(13, np.float32), "aaaabbb"],
        "pointers": [np.array([0, 16])],
        "sample_index": [np.zeros((4, 3), np.int32)],
        "shuffle_index": [int32(0, 1, 2)],
        "extra": [-1, 2],
        "pad": [2**63],
    },
}


def wrong_forms(values):
    """What no function of C takes in place of an array."""
    forms = [values.astype("O"), values[None], np.repeat(values, 2, axis=-1)[..., ::2]]
    if values.itemsize > 1:
        forms.append(values.astype(values.dtype.newbyteorder()))
    if values.ndim > 1:
        forms.append(np.asfortranarray(values))
    return forms


def overlapping(values, others):
    """Two arrays like these, of which the last byte of one is the first of the other."""
    memory = np.zeros(values.nbytes + others.nbytes - 1, np.uint8)
    first = np.ndarray(values.shape, values.dtype, memory)
    return first, np.ndarray(others.shape, others.dtype, memory, values.nbytes - 1)


def refused_calls(name):
    """The toy call with an argument, or two, that a function of C has to refuse."""
    usual = toy_call(name)
    filled = list(usual)[: FILLED[name]]
    for key, value in usual.items():
        wrong = list(OUT_OF_RANGE[name].get(key, []))
        if isinstance(value, np.ndarray):
            wrong += wrong_forms(value)
        elif type(value) is int:
            wrong += [None, "4", [4], 1.5]
        if key in filled:
            wrong.append(read_only(value))
        if key in filled and key != "array":  # any array may be shuffled
            wrong += [np.delete(value, -1, axis) for axis in range(value.ndim)]
        for one_of_them in wrong:
            yield toy_call(name) | {key: one_of_them}
    for key in filled:
        for other, values in usual.items():
            if other != key and isinstance(values, np.ndarray):
                first, last = overlapping(usual[key], values)
                yield usual | {key: first, other: last}


def is_refused(c, name, call):
    """Does a function of C raise an error?"""
    try:
        call_c(c, name, call)
    except (TypeError, ValueError, OverflowError):
        return True
    return False


@pytest.mark.parametrize("name", FILLED)
def test_c_refuses_bad_calls(c, name):
    """And gives back what it has borrowed: no reference and no memory is left.

    Memory is counted in blocks that were asked for in this file and are still there: fewer than
    calls.  Other threads and Python itself keep some bytes of their own, however many the calls.
    """
    calls = list(refused_calls(name))
    assert all(is_refused(c, name, call) for call in calls)
    calls.append(toy_call(name))
    assert call_c(c, name, calls[-1]) is not False
    arrays = []
    for call in calls:
        arrays += [value for value in call.values() if isinstance(value, np.ndarray)]
    counts = [sys.getrefcount(values) for values in arrays]
    repeats = 40
    tracemalloc.start()
    for _ in range(repeats):
        for call in calls:
            is_refused(c, name, call)
    left = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, __file__)])
    tracemalloc.stop()
    assert sum(line.count for line in left.statistics("filename")) < repeats
    assert [sys.getrefcount(values) for values in arrays] == counts


NO_PLACES = [  # (sample, array, values in it that lead that sample to no place)
    (1, "sample_index", [[0, 0], [-1, 2], [0, 2], [2, 5]]),  # begins before the first document
    (1, "sample_index", [[0, 0], [1, -1], [2, 0], [2, 5]]),  # begins before a document
    (1, "sample_index", [[0, 0], [1, 0], [2, -2], [2, 5]]),
    (2, "sample_index", [[0, 0], [1, 0], [2, 3], [3, 0]]),  # ends in a fourth of three
    (2, "sample_index", [[0, 0], [1, 0], [2, 1], [2, 6]]),  # ends behind a document
    (1, "sample_index", [[0, 0], [1, 0], [0, 1], [2, 5]]),  # goes back
    (0, "document_index", [0, 3, 2]),
    (0, "document_index", [0, -1, 2]),
    (0, "shuffle_index", [3, 1, 2]),
    (3, "places", [0, 1, 2]),  # there is no sample 3
    (-4, "places", [0, 1, 2]),
    (0, "places", [3, 1, 2]),
    (0, "places", [-1, 1, 2]),
    (0, "pointers", [-4, 16, 28]),
    (2, "pointers", [0, 16, 32]),
    (2, "pointers", [0, 16, 26]),  # in the middle of a token
    (0, "lengths", [14, 3, 6]),
    (0, "lengths", [-1, 3, 6]),
]


def test_c_reads_nothing_outside_of_an_array(c):
    for k, name, values in NO_PLACES:
        call = toy_call("read_samples") | {"wanted": np.array([k])}
        call[name][...] = values
        assert call_c(c, "read_samples", call) is False, (k, name, values)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILLED)
def test_c_releases_the_gil(c, name):
    """Another thread ends while this one does nothing but call."""
    thread = threading.Thread(target=time.sleep, args=[0.001])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # only a lock that is released lets the other thread in
    call = toy_call(name)
    try:
        thread.start()
        for _ in range(1_000_000):  # a call is short, and the system may wake the thread late
            call_c(c, name, call)
            if not thread.is_alive():
                break
        assert not thread.is_alive()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


# -- what setup.py builds and packs ----------------------------------------------------------------


def run_setup(folder, *words, **variables):
    """Run setup.py in a folder with these environment variables, and without a network."""
    environment = os.environ | {"MEGATRON_MIN_C": ""} | variables
    run = [sys.executable, "-W", "ignore", "setup.py", "-q", *words]
    subprocess.run(run, cwd=folder, env=environment, check=True, capture_output=True)


@pytest.fixture
def sources(tmp_path):
    """A folder with the files of the project."""
    if not (HERE / "setup.py").exists():
        pytest.skip("setup.py is not beside this file")
    pytest.importorskip("setuptools.command.bdist_wheel", reason="setuptools is before 70.1")
    folder = tmp_path / "sources"
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("*.so", "build", "dist", ".git"))
    return folder


WHEELS = {  # {why: (environment, the tag of the wheel; None: an error)}
    "not wanted": ({"MEGATRON_MIN_C": "0"}, "py3-none-any"),
    "no compiler": ({"CC": "false"}, "py3-none-any"),
    "C": ({"MEGATRON_MIN_C": "1"}, "cp311-abi3-"),
    "C without a compiler": ({"MEGATRON_MIN_C": "1", "CC": "false"}, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WHEELS)
def test_a_wheel_without_c_is_pure(sources, case):
    """Or it is an error, where C is wanted."""
    if case == "C" and "c" not in IMPLEMENTATIONS:
        pytest.skip("there is no C compiler")
    variables, tag = WHEELS[case]
    if tag is None:
        with pytest.raises(subprocess.CalledProcessError) as error:
            run_setup(sources, "bdist_wheel", **variables)
        assert b"'false'" in error.value.stderr
        return
    run_setup(sources, "bdist_wheel", **variables)
    [wheel] = (sources / "dist").iterdir()
    assert tag in wheel.name
    names = "".join(zipfile.ZipFile(wheel).namelist())
    assert ("_megatron_min." in names) == (case == "C")


@pytest.mark.slow
def test_an_sdist_builds_and_passes_its_tests(sources, tmp_path):
    run_setup(sources, "sdist", MEGATRON_MIN_C="0")
    [archive] = (sources / "dist").iterdir()
    shutil.unpack_archive(archive, tmp_path)
    [folder] = tmp_path.glob("megatron_min-*")
    switch = "1" if "c" in IMPLEMENTATIONS else "0"
    run_setup(folder, "build_ext", "--inplace", MEGATRON_MIN_C=switch)
    tests = "toy_example_by_hand or the_switch_reaches_every_loop or doctests_of_the_module"
    run = [sys.executable, "-m", "pytest", "-q", "-k", tests]
    environment = os.environ | {"MEGATRON_MIN_C": switch}
    ran = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


# ==============================================================================
# 17. Tokenizers
# ==============================================================================


def test_the_null_tokenizer_takes_numbers(one):
    tokenizer = one.build_tokenizer("null:100")
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("1 2 30") == [1, 2, 30]
    assert tokenizer.detokenize(np.array([1, 2])) == "1 2"
    assert one.NullTokenizer(7).unique_identifiers != tokenizer.unique_identifiers


MY_TOKENS = """
class Odd:
    vocab_size, eod, unique_identifiers = 9, 8, {}
    def tokenize(self, text): return [len(text)]
    def detokenize(self, ids): return str(list(ids))
odd = Odd()
def make(): return odd
"""


def test_tokenizer_by_module_and_attribute(one, tmp_path, monkeypatch):
    """A class, an object or a function; the module lies in the current folder."""
    (tmp_path / "my_tokens.py").write_text(MY_TOKENS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_tokens", raising=False)
    before = list(sys.path)
    for attribute in ("Odd", "odd", "make"):
        assert one.build_tokenizer(f"my_tokens:{attribute}").tokenize("abc") == [3]
    assert sys.path == before


@pytest.fixture
def hf(tmp_path):
    """A tokenizer.json of whole words, made here, which puts </s> in front of a text, if asked.

    It asks for texts to be cut off and filled up: for models that read one text, not for a corpus.
    """
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "ja": 1, "nein": 2, "<|endoftext|>": 3, "</s>": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 4)]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=3)
    path = str(tmp_path / "tokenizer.json")
    tokenizer.save(path)
    return path


def test_hugging_face_tokenizer(one, tmp_path, hf):
    """Its identifiers tell apart what makes other tokens."""
    plain = one.build_tokenizer(os.path.dirname(hf))  # the folder that holds tokenizer.json
    path = jsonl(tmp_path / "a.jsonl", ["ja nein ja", "nein was"])
    for eod_text, start, eod in (
        (None, [], 3),
        ("</s>", [], 4),
        (None, [4], 3),  # with special tokens, as Llama's file has them, for those who ask
    ):
        tokenizer = one.build_tokenizer(hf, eod_text, bool(start))
        assert (tokenizer.vocab_size, tokenizer.eod) == (5, eod)
        assert tokenizer.tokenize("nein ja ja") == [*start, 2, 1, 1]
        batch = tokenizer.tokenize_batch(["nein ja ja", "", "was"])
        assert lists(batch) == [[*start, 2, 1, 1], start, [*start, 0]]
        assert tokenizer.detokenize([1, 3]) == "ja <|endoftext|>"
        is_same = tokenizer.unique_identifiers == plain.unique_identifiers
        assert is_same == (eod_text is None and start == [])
        made = one.preprocess(path, tmp_path / "o", tokenizer, append_eod=True, workers=2)["text"]
        assert texts_of(one, made) == [[*start, 1, 2, 1, eod], [*start, 2, 0, eod]]


def test_a_tokenizer_that_is_of_no_use(one, tmp_path, hf, monkeypatch):
    """The error has the name of what is wrong."""
    path = tmp_path / "no.json"
    path.write_text('{"a": 1}')
    monkeypatch.chdir(tmp_path)
    for name, eod_text, adds_special_tokens, words in (
        ("none", None, False, "unknown tokenizer 'none'"),
        ("no.json", None, False, r"no\.json: wanted a tokenizer\.json"),
        ("gigatoken:none.json", None, False, r"none\.json"),
        ("null:x", None, False, "'x'"),
        ("no_such_module:x", None, False, "no_such_module"),
        (hf, "<none>", False, "<none>"),
        ("bytes", None, True, "special tokens"),
    ):
        with pytest.raises((ValueError, ImportError), match=words):
            one.build_tokenizer(name, eod_text, adds_special_tokens)
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"tokenizers.*megatron-min\[tools\]"):
        one.build_tokenizer(hf)


LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = r"""
the| the|The|<s>|<é>|<｜x｜>|ing|a| |  |\n|\r\n|\t|1|12345|'s|'LL|don't|é|e\u0301|\u0301|Å|\u212b
|ﬁ|ß|İ|日本|語|한|\u1112\u1161|🙂|👩\u200d🚀|\u200b|\xa0|\u2028|▁|_|\x00|\x7f|\ufeff|\ufffd
|\U0010ffff|{|}}|://|...|x|Z|٣|²|<|endoftext|>
"""
PIECES = [ast.literal_eval(f'"{piece}"') for piece in PIECES.replace("\n", "").split("|")]


def odd_texts(rng, count):
    """Texts of odd pieces, put together at random; the first one is empty."""
    texts = [""]
    for _ in range(count):
        texts.append("".join(rng.choice(PIECES, rng.integers(1, 30))))
    return texts


@pytest.fixture(scope="session", params=["gpt2", "llama3"])
def bpe(request, tmp_path_factory):
    """A tokenizer.json of the kind of GPT-2's, or of Llama 3's, made here -> its path."""
    tokenizers = pytest.importorskip("tokenizers")
    steps = tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    if request.param == "gpt2":
        tokenizer.pre_tokenizer = steps.ByteLevel(add_prefix_space=False)
    else:
        split = steps.Split(tokenizers.Regex(LLAMA3_SPLIT), "isolated")
        in_bytes = steps.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = steps.Sequence([split, in_bytes])
    pieces = " ".join(PIECES * 3) + " the thing is that singing in the rain is nothing new " * 9
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=steps.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([pieces], trainer)
    path = str(tmp_path_factory.mktemp(request.param) / "tokenizer.json")
    tokenizer.save(path)
    return path


def test_gigatoken_makes_the_ids_of_tokenizers(one, tmp_path, bpe):
    """The pairs are equal, for any number of workers; their records say which package made them."""
    pytest.importorskip("gigatoken")
    tokenizer = one.build_tokenizer(bpe)
    fast = one.build_tokenizer(f"gigatoken:{bpe}")
    texts = odd_texts(np.random.default_rng(0), 900)
    ids = [tokenizer.tokenize(text) for text in texts]
    assert lists(fast.tokenize_batch(texts)) == ids
    assert [fast.tokenize(text) for text in texts[:50]] == ids[:50]
    assert lists(fast.tokenize_batch([])) == []
    assert lists(pickle.loads(pickle.dumps(fast)).tokenize_batch(texts[:9])) == ids[:9]
    pairs = []
    for package, name, workers in (
        ("tokenizers", bpe, 1),
        ("gigatoken", f"gigatoken:{bpe}", 1),
        ("gigatoken", f"gigatoken:{bpe}", 2),
    ):
        job = {"output_prefix": tmp_path / "o", "tokenizer": name, "workers": workers}
        made = one.preprocess(texts=texts, **job)["text"]
        pairs.append(bytes_of_pair(made))
        assert record_of(made)["tokenizer"]["package"] == package
    assert pairs[0] == pairs[1] == pairs[2]


def test_gigatoken_is_made_anew_after_much_text(one, bpe):
    """It keeps each word that it has seen."""
    gigatoken = pytest.importorskip("gigatoken")
    make = gigatoken.Tokenizer.from_json
    with mock.patch.object(gigatoken.Tokenizer, "from_json", side_effect=make) as made:
        tokenizer = one.build_tokenizer(f"gigatoken:{bpe}")
        ids = tokenizer.tokenize("the thing")
        for count in (1, 1, 6 << 20, 1, 1):
            tokenizer.tokenize_batch(["the thing " * count])
            assert tokenizer.tokenize("the thing") == ids
    assert made.call_count == 2


def test_what_gigatoken_does_not_take(one, tmp_path, bpe, monkeypatch):
    """Its own error comes with the name of the file."""
    pytest.importorskip("gigatoken")
    content = json.loads(pathlib.Path(bpe).read_text())
    content["pre_tokenizer"] = {"type": "Digits", "individual_digits": True}
    path = tmp_path / "digits.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"digits\.json: gigatoken refuses it: .*Digits"):
        one.build_tokenizer(f"gigatoken:{path}")
    monkeypatch.setitem(sys.modules, "gigatoken", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"gigatoken.*megatron-min\[tools\]"):
        one.build_tokenizer(f"gigatoken:{bpe}")


# ==============================================================================
# 18. Preprocessing
# ==============================================================================


GOOD = b'{"text": "1"}\n'  # a line that every tokenizer of this section takes
COMPRESSED = [".gz", ".bz2", ".xz", ".zst"]


def compress(content, extension):
    """Content as two whole compressed files, laid end to end."""
    if extension == "":
        return content
    if extension == ".zst":
        module = pytest.importorskip("backports.zstd")
    else:
        module = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[extension]
    half = len(content) // 2
    return module.compress(content[:half]) + module.compress(content[half:])


def write_parquet(path, columns, **arguments):
    """Write a Parquet file -> its path."""
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(sys.modules["pyarrow"].table(columns), path, **arguments)
    return path


def test_what_verbose_shows(one, tmp_path, monkeypatch, capsys):
    """A line at the end, and in a terminal a bar besides, where tqdm is installed."""
    has_tqdm = importlib.util.find_spec("tqdm") is not None
    path = jsonl(tmp_path / "a.jsonl", ["a", "b"])
    one.preprocess(path, tmp_path / "o")
    assert capsys.readouterr().err == ""
    for is_terminal, has_bar in ((False, False), (True, has_tqdm), (True, False)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda found=is_terminal: found)
        if is_terminal and not has_bar:
            monkeypatch.setitem(sys.modules, "tqdm", None)
        one.preprocess(path, tmp_path / "o", verbose=True)
        shown = capsys.readouterr().err
        line = rf"2 documents, {os.path.getsize(path)} bytes, [\d.,]+ MB/s\n"
        assert re.search(f"{line}$" if has_bar else f"^{line}$", shown)
        assert ("100%" in shown) == has_bar


# -- Shards ------------------------------------------------------------------------------------


def make_shards(one, inputs, folder, count, **arguments):
    """Make all shards, and merge them -> the prefix of the merged pair."""
    shards = []
    for index in range(count):
        made = one.preprocess(inputs, folder / "s", shard=(index, count), **arguments)
        shards += made.values()
    assert len(set(shards)) == count
    assert shards == sorted(shards)
    one.merge(shards, folder / "merged")
    return folder / "merged"


def random_input(rng):
    """JSON lines of all kinds that are good: with blank lines, sentences, CRLF, a BOM."""
    lines = []
    for text in odd_texts(rng, rng.integers(0, 30)):
        line = json.dumps({"text": text, "n": 1}, ensure_ascii=bool(rng.integers(2))).encode()
        if rng.random() < 0.1:
            line = json.dumps({"text": [text, "", "b"]}).encode()
        if rng.random() < 0.1:
            line = rng.choice([b"", b"  ", b"\xef\xbb\xbf" + line])
        lines.append(line + rng.choice([b"\n", b"\r\n"]))
    content = b"".join(lines)
    if rng.random() < 0.5:
        return content.removesuffix(b"\n")
    return content


def test_random_corpora_equal_the_plain_loop(one, tmp_path, monkeypatch):
    """By 1 to 3 workers, and as 2 to 5 shards, which are merged; with blocks of all sizes."""
    extensions = [*COMPRESSED, *[""] * 4]
    if importlib.util.find_spec("backports") is None:
        extensions.remove(".zst")
    for case, rng in enumerate(cases(4)):
        monkeypatch.setattr(one, "_BLOCK_BYTES", int(rng.choice([1, 100, 5000, 1 << 19])))
        folder = tmp_path / str(case)
        folder.mkdir()
        contents = [random_input(rng) for _ in range(rng.integers(1, 6))]
        paths = []
        for number, content in enumerate(contents):
            extension = str(rng.choice(extensions))
            paths.append(folder / f"{number}.jsonl{extension}")
            paths[-1].write_bytes(compress(content, extension))
        (folder / "all").write_bytes(b"\n".join(contents))
        one.encode_jsonl(folder / "all", folder / "plain", append_eod=True)
        plain = bytes_of_pair(folder / "plain")
        for workers in (1, 2, 3):
            found = {"append_eod": True, "workers": workers}
            made = quiet(one.preprocess, paths, folder / "o", **found)
            assert made == {"text": f"{folder}/o_text_document"}
            assert bytes_of_pair(made["text"]) == plain
            count = int(rng.integers(2, 6))
            merged = quiet(make_shards, one, paths, folder, count, **found)
            assert bytes_of_pair(merged) == plain


def bytes_read():
    """How many bytes this process has read from files so far, on Linux."""
    return int(pathlib.Path("/proc/self/io").read_text().split()[1])


@linux
def test_a_shard_reads_its_share_and_no_more(one, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["x" * 100] * 20_000)
    one.preprocess(path, tmp_path / "s", shard=(0, 4))  # what is imported is read, too
    for index in range(4):
        before = bytes_read()
        one.preprocess(path, tmp_path / "s", shard=(index, 4))
        share = os.path.getsize(path) / 4
        assert share <= bytes_read() - before < 1.2 * share


def test_all_shards_are_merged_or_none(one, tmp_path, monkeypatch):
    """In order; of several corpora, too."""
    monkeypatch.chdir(tmp_path)
    for name in ("a_00000_of_00002", "a_00001_of_00002"):
        mk(one, tmp_path / name, [[1]])
    for prefixes, missing in (
        ("a_00000_of_00002", "a_00001_of_00002"),
        ("a_00001_of_00002 a_00000_of_00002", "a_00000_of_00002"),
        ("a_00000_of_00002 b", "a_00001_of_00002"),
        ("a_00000_of_00002 a_00001_of_00002 b c_00000_of_00001", r"b\.idx"),
    ):
        with pytest.raises((ValueError, OSError), match=missing):
            one.merge(prefixes.split(), "o")
        assert glob.glob("o*") == []


# -- Records -----------------------------------------------------------------------------------


def record_of(prefix):
    """The record beside a pair."""
    return json.loads(pathlib.Path(f"{prefix}.record.json").read_text())


def inputs_of(one, prefix):
    """[(name of the input, number in there)] of the documents of a pair that have tokens."""
    found = {}
    ds = gpt(one, prefix, sequence_length=1, tokenizer=one.ByteTokenizer())
    for k in range(len(ds)):
        for span in one.trace(ds, k):
            found[span.document] = (span.input, span.input_document)
    return [found[document] for document in sorted(found)]


def test_the_way_back_to_the_inputs(one, tmp_path, monkeypatch):
    """Of one job, of merged shards, and of several such pairs that are merged."""
    for case, rng in enumerate(cases(4)):
        (tmp_path / str(case)).mkdir()
        monkeypatch.chdir(tmp_path / str(case))
        names = [f"{name}.jsonl" for name in "abc"]
        for name in names:
            numbers = range(int(rng.integers(1, 9)))
            lines = [b'{"text": "%s %d"}\n' % (name.encode(), number) for number in numbers]
            pathlib.Path(name).write_bytes(b"\n".join(lines))  # with blank lines
        whole = quiet(one.preprocess, "*.jsonl", "whole")["text"]
        merged = quiet(make_shards, one, names, pathlib.Path("."), int(rng.integers(2, 20)))
        one.merge([merged, whole, merged], "all")
        assert record_of(merged)["inputs"] == record_of(whole)["inputs"]
        assert len(record_of("all")["inputs"]) == 9
        for prefix in (whole, merged, "all"):
            texts = [bytes(ids).decode() for ids in texts_of(one, prefix)]
            assert texts == [f"{name} {number}" for name, number in inputs_of(one, prefix)]


def test_parts_of_an_input_are_joined_where_one_goes_on_with_the_other(one, tmp_path, monkeypatch):
    """A shard by itself counts from where it begins; and the middle one of three is not merged."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("a.jsonl").write_bytes(GOOD * 9)
    prefixes = []
    for number in range(3):
        made = one.preprocess("a.jsonl", "o", shard=(number, 3))["text"]
        assert inputs_of(one, made)[2][1] == 2
        prefixes.append(f"part{number}")
        for extension in ("bin", "idx", "record.json"):
            os.rename(f"{made}.{extension}", f"{prefixes[-1]}.{extension}")
    for merged, documents in ((prefixes, [9]), ([prefixes[0], prefixes[2]], [3, 3])):
        one.merge(merged, "merged")
        assert [part["documents"] for part in record_of("merged")["inputs"]] == documents
    assert inputs_of(one, "merged")[-1] == ("a.jsonl from byte 84 on", 2)


def test_the_record_of_a_pair(one, tmp_path, monkeypatch):
    """It says what the pair was made from, without secrets; of another pair it says nothing.

    A pair without one is an input of its own; a new pair takes the record of the old one away.
    """
    monkeypatch.chdir(tmp_path)
    fsspec.filesystem("memory").pipe_file("/me:s3cret@b/a.jsonl?sig=s3cret", GOOD)
    inputs = ["memory://me:s3cret@b/a.jsonl?sig=s3cret", jsonl("b.jsonl", ["d"])]
    made = one.preprocess(inputs, "o", append_eod=True)["text"]
    size = os.path.getsize("b.jsonl")
    record = record_of(made)
    assert record["inputs"] == [
        {"name": "memory://b/a.jsonl", "size": 14, "begin": 0, "end": 14, "documents": 1},
        {"name": "b.jsonl", "size": size, "begin": 0, "end": size, "documents": 1},
    ]
    assert record["tokenizer"] == one.ByteTokenizer.unique_identifiers
    mk(one, tmp_path / "upstream", [[1], [2], [3]], np.uint16)
    one.merge([made, "upstream", made], "all")
    known = [("memory://b/a.jsonl", 0), ("b.jsonl", 0)]
    assert inputs_of(one, "all") == [*known, *[("upstream", k) for k in range(3)], *known]
    assert record_of("all")["tokenizer"] is None
    mk(one, tmp_path / "all", [[5]])
    assert not os.path.exists("all.record.json")
    for content in (json.dumps(record | {"bin": 9}), json.dumps(record | {"idx": 9}), "[]", "{"):
        pathlib.Path(f"{made}.record.json").write_text(content)
        assert inputs_of(one, made) == [(None, None)] * 2
    pathlib.Path(f"{made}.record.json").write_text(json.dumps(record | {"inputs": []}))
    with pytest.raises(IndexError, match="too few"):
        inputs_of(one, made)


def test_another_tokenizer_than_that_of_the_pair(one, tmp_path, recwarn):
    """It is told when indices are built; nothing is known of a pair without a record."""
    texts = ["1 2 3 4 5 6 7 8 9"] * 2
    tokenizer = Tok(vocab_size=9)
    made = one.preprocess(texts=texts, output_prefix=tmp_path / "o", tokenizer=tokenizer)["text"]
    gpt(one, made, 2, tokenizer=Tok(vocab_size=9))
    gpt(one, mk(one, tmp_path / "p", [[1] * 9]), 1, tokenizer=Tok(eod=5))
    assert len(recwarn) == 0
    with pytest.warns(UserWarning, match=r"o_text_document .*'eod': 0.*'eod': 5"):
        gpt(one, made, 2, tokenizer=Tok(eod=5))


# -- Inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", COMPRESSED)
def test_a_compressed_file_that_is_cut_or_changed_is_named(one, tmp_path, extension):
    """Cut anywhere, or with another beginning."""
    texts = [str(i * i) for i in range(3000)]
    path = tmp_path / f"b.jsonl{extension}"
    whole = compress(pathlib.Path(jsonl(tmp_path / "a.jsonl", texts)).read_bytes(), extension)
    damaged = [whole[: rng.integers(1, len(whole))] for rng in cases(8)]
    for content in [*damaged, b"\xff" * 20 + whole[20:]]:
        path.write_bytes(content)
        with pytest.raises(OSError, match=r"b\.jsonl\S+: cannot be read"):
            one.preprocess([tmp_path / "a.jsonl", path], tmp_path / "o")
        assert sorted(os.listdir(tmp_path)) == ["a.jsonl", path.name]


@pytest.mark.parametrize("count", [1, 3, 40])
def test_inputs_of_all_kinds_from_all_places(one, tmp_path, count):
    """URLs with queries, patterns of URLs, and files, in any order; sharded, too.

    Arguments keep their order, and a pattern is sorted.  Upstream: as the file system has them.
    """
    memory = fsspec.filesystem("memory")
    lines = b'{"text": "a"}\n\n{"text": "bcdefg"}\n \n{"text": ""}\r\n{"text": "h"}\n'
    for name, content in (("b2", GOOD * 3), ("b1", lines), ("b10", b'{"text": "x"}')):
        memory.pipe_file(f"{tmp_path}/{name}.jsonl", content)
    for name in ("d2", "d1", "d10", "[de]*"):  # a name that exists is no pattern
        jsonl(tmp_path / f"{name}.json", [name])
    compressed = tmp_path / "c.jsonl.gz"
    compressed.write_bytes(compress(GOOD * 9, ".gz"))
    memory.pipe_file(f"{compressed}?sig=1", compressed.read_bytes())
    inputs = [f"memory://{compressed}?sig=1", compressed, f"memory://{tmp_path}/b*.jsonl"]
    inputs += [tmp_path / "d*.json", f"{tmp_path}/[de]*.json"]
    merged = make_shards(one, inputs, tmp_path, count)
    texts = [*["1"] * 18, "a", "bcdefg", "", "h", "x", "1", "1", "1", "d1", "d10", "d2", "[de]*"]
    assert texts_of(one, merged) == [list(text.encode()) for text in texts]


def test_zst_is_read_by_one_that_reads_all_of_it(one, tmp_path, monkeypatch):
    """fsspec's reader by the package zstandard ends after the first frame, without a word."""

    def zstandard_file(infile, mode="rb"):
        raise AssertionError("this reader is not used")

    monkeypatch.setitem(fsspec.compression.compr, "zstd", zstandard_file)
    path = tmp_path / "a.jsonl.ZST"
    path.write_bytes(GOOD)
    with pytest.raises(ImportError, match=r"compression\.zstd.*backports\.zstd.*\[tools\]"):
        one.preprocess(path, tmp_path / "o")


@pytest.mark.parametrize("workers, append_eod", [(1, True), (2, False)])
def test_sentences_are_sequences(one, tmp_path, monkeypatch, workers, append_eod):
    """They are found by nltk's model of English."""
    pytest.importorskip("nltk")
    punkt = mock.Mock()
    full_stops = types.SimpleNamespace(tokenize=re.compile(r"[^.]+\.?").findall)
    punkt.PunktTokenizer.return_value = full_stops
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", punkt)
    # the last one is a list of parts, each of which is split
    path = jsonl(tmp_path / "a.jsonl", ["1 2. 3.", "", "4", ["7. 8", "", "9."]])
    flags = {"split_sentences": True, "append_eod": append_eod, "workers": workers}
    made = one.preprocess(path, tmp_path / "o", **flags)
    assert made == {"text": f"{tmp_path}/o_text_sentence"}
    punkt.PunktTokenizer.assert_called_with("english")
    pair = one.IndexedDataset(made["text"])
    found = [bytes((ids % 220).tolist()).decode() for ids in pair[:]]  # 256 % 220 is a $
    wanted = ["1 2.", " 3.$", "4$", "7.", " 8", "9.$"]
    assert found == [text if append_eod else text.removesuffix("$") for text in wanted]
    assert pair.document_indices.tolist() == [0, 2, 2, 3, 6]


def test_sentences_without_a_model_of_english(one, tmp_path, monkeypatch):
    """And without nltk."""
    punkt = pytest.importorskip("nltk.tokenize.punkt")
    path = jsonl(tmp_path / "a.jsonl", ["I see.  You do? Yes", "\n"])
    monkeypatch.setattr(punkt, "PunktTokenizer", mock.Mock(side_effect=LookupError))
    with pytest.warns(UserWarning, match="punkt_tab"):
        made = one.preprocess(path, tmp_path / "o", split_sentences=True)["text"]
    sentences = [bytes(ids.tolist()) for ids in one.IndexedDataset(made)[:]]
    assert sentences == [b"I see.", b"You do?", b"Yes"]
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"nltk.*megatron-min\[tools\]"):
        one.preprocess(path, tmp_path / "o", split_sentences=True)


# -- Documents ---------------------------------------------------------------------------------


def numbers_of(texts):
    """A tokenize_batch(), which takes many texts at once, and none of them if one is bad."""
    return [[int(number) for number in text.split()] for text in texts]


def forget_the_last(texts):
    """A tokenize_batch() that loses a text."""
    return numbers_of(texts[:-1])


XY = {"json_keys": ["y", "x"]}
SKIP = {"on_error": "skip"}
BATCHED = {"tokenizer": Tok(tokenize_batch=numbers_of)}
FORGETFUL = {"tokenizer": Tok(tokenize_batch=forget_the_last)}
LARGE = {"tokenizer": Tok(vocab_size=70001)}
ENCODED = [  # the file, arguments, and the documents of the pair of each key
    (b'{"x": "a", "y": "b", "z": 3}\n{"y": "", "x": "c"}\n', XY, [[[98], []], [[97], [99]]]),
    (b'{"x": "1", "y": "2"}\n{"x": "3", "y": "n"}\n', XY | BATCHED | SKIP, [[[2]], [[1]]]),
    (b'{"text": "1 70000"}\n', LARGE, [[[1, 70000]]]),
]


@pytest.mark.parametrize("content, arguments, wanted", ENCODED)
def test_documents_of_a_file(one, tmp_path, content, arguments, wanted):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    made = quiet(one.preprocess, path, tmp_path / "o", **arguments)
    assert list(made) == arguments.get("json_keys", ["text"])
    assert [texts_of(one, prefix) for prefix in made.values()] == wanted


@pytest.mark.parametrize("workers", [1, 2])
def test_standard_input_and_pipes(one, tmp_path, monkeypatch, workers):
    """Cut off within a line, as when the program before the pipe is killed, and whole."""
    text = b'{"text": "ab"}\n{"text": "c"}'
    path = jsonl(tmp_path / "a.jsonl", ["d"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text[:-2])))
    with pytest.raises(ValueError, match="^-: line 2: "):
        one.preprocess(["-", path], tmp_path / "o", workers=workers)
    assert os.listdir(tmp_path) == ["a.jsonl"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    inputs = ["-", path]
    wanted = [[97, 98], [99], [100]]
    if hasattr(os, "mkfifo"):
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        threading.Thread(target=fifo.write_bytes, args=(text,)).start()
        inputs.append(fifo)
        wanted = [*wanted, *wanted[:2]]
    made = one.preprocess(inputs, tmp_path / "o", workers=workers)
    assert texts_of(one, made["text"]) == wanted


BAD_TEXTS = {  # a line, and a word of the reason
    b'{"text": "a"': "delimiter",
    b'{"other": "a"}': "'text'",
    b'{"text": ["a", 5]}': "'text'",
    b'["text"]': "'text'",
    b'{"text": "\xff"}': "utf-8",
    b'{"text": "\\ud800"}': "utf-8",  # half a surrogate
    b"[" * 100_000: "recursion",
}
REFUSED = {  # the file a.jsonl, other arguments of preprocess, and what the error says
    "tokenizer": (GOOD + b'{"text": "2 x"}\n', {"tokenizer": Tok()}, r"a\.jsonl: line 2: .*'x'"),
    "lost texts": (GOOD * 2, FORGETFUL, "tokenize_batch"),
    "an id that does not fit": (b'{"text": "70000"}', {"tokenizer": Tok()}, "line 1: .*70000"),
    "in a shard": (GOOD * 10 + b"oops\n", {"shard": (1, 2)}, "from byte 72 on: line 5: "),
    "no file of a pattern": (GOOD, {"input": ["a.jsonl", "*.none"]}, r"\*\.none"),
    "a folder": (GOOD, {"input": "."}, "directory"),
    "no object of a pattern": (GOOD, {"input": "memory://none*.jsonl"}, "matches none"),
    "nothing to read": (GOOD, {"input": None}, "one of input, which are paths, and texts"),
    "no input": (GOOD, {"input": []}, "input"),
    "one text": (GOOD, {"input": None, "texts": "abc"}, "an iterable of texts"),
    "a shard of texts": (GOOD, {"input": None, "texts": ["a"], "shard": (0, 2)}, "without a shard"),
    "no text": (GOOD, {"input": None, "texts": ["a", 5]}, "texts: line 2: wanted .* got .*5"),
    "workers": (GOOD, {"workers": 0}, "workers must be >= 1"),
    "shard": (GOOD, {"shard": (2, 2)}, "wanted a shard i/n .* got 2/2"),
    "a shard of a pipe": (GOOD, {"input": "-", "shard": (0, 2)}, "-: its size is not known"),
    "on_error": (GOOD, {"on_error": "maybe"}, "stop or skip"),
}
for line, word in BAD_TEXTS.items():
    words = rf"a\.jsonl: line 3: .*{word}"
    REFUSED[line[:20].decode("latin-1")] = (GOOD * 2 + line + b"\n" + GOOD, {}, words)


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_its_reason_and_leaves_nothing(one, tmp_path, monkeypatch, case):
    """Upstream: hangs at a bad line, and leaves a .bin of no bytes."""
    content, arguments, words = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    pathlib.Path("a.jsonl").write_bytes(content)
    with pytest.raises((ValueError, OSError), match=words):
        one.preprocess(**{"input": "a.jsonl", "output_prefix": "o"} | arguments)
    assert os.listdir() == ["a.jsonl"]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_bad_line_anywhere_is_named(one, tmp_path, monkeypatch, workers):
    """Its number counts blank lines too; among blocks of a few lines."""
    monkeypatch.setattr(one, "_BLOCK_BYTES", 60)
    for rng in cases(5):
        lines = [bytes(rng.choice([GOOD, GOOD, b"\n"])) for _ in range(rng.integers(1, 60))]
        bad = int(rng.integers(len(lines)))
        lines[bad] = b"oops\n"
        (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
        with pytest.raises(ValueError, match=rf"a\.jsonl: line {bad + 1}: "):
            one.preprocess(tmp_path / "a.jsonl", tmp_path / "o", workers=workers)
        assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_are_skipped_and_counted(one, tmp_path, workers):
    """And files without a document are said."""
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"\n".join([*BAD_TEXTS, b" ", b""]) + b"\n" + GOOD)
    (tmp_path / "b.jsonl").write_bytes(b"")
    with pytest.warns(UserWarning) as told:
        made = one.preprocess(
            tmp_path / "*.jsonl", tmp_path / "o", on_error="skip", workers=workers
        )
    left_out, empty = [str(warning.message) for warning in told]
    assert re.search(r"left out 7 bad lines; the first: .*a\.jsonl: line 2: ", left_out)
    assert re.search(r"no document came from 1 inputs: .*b\.jsonl$", empty)
    assert texts_of(one, made["text"]) == [[49], [49]]


class Acting(Tok):
    """Does something at each text, before it tokenizes it."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def tokenize(self, text):
        self.act(text)
        return super().tokenize(text)


@pytest.mark.parametrize("extension", ["", *COMPRESSED])
def test_an_input_that_is_cut_off_while_it_is_read(one, tmp_path, extension):
    """At the end of a line, or of a compressed part: what is left is a whole file."""
    path = tmp_path / f"a.jsonl{extension}"
    parts = []
    for seed in range(6):
        numbers = " ".join(map(str, np.random.default_rng(seed).integers(0, 1000, 1 << 17)))
        parts.append(compress(json.dumps({"text": numbers}).encode() + b"\n", extension))
    path.write_bytes(b"".join(parts))
    size = sum(len(part) for part in parts[:5])
    with pytest.raises(OSError, match=r"a\.jsonl\S*: it had .* cut off meanwhile"):
        one.preprocess(path, tmp_path / "o", Acting(lambda text: os.truncate(path, size)))
    assert os.listdir(tmp_path) == [path.name]


def test_texts_in_the_place_of_files(one, tmp_path):
    """The same workers, the same files, of several blocks for each worker."""
    rows = [{"x": "a" * 300 * k, "n": k, "y": ["b", "c" * k]} for k in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"json_keys": ["y", "x"], "append_eod": True}
    wanted = one.preprocess(tmp_path / "a.jsonl", tmp_path / "file", **keys)
    made = one.preprocess(texts=iter(rows), output_prefix=tmp_path / "o", workers=3, **keys)
    for key in made:
        assert bytes_of_pair(made[key]) == bytes_of_pair(wanted[key])
    texts = (row["x"] for row in rows)
    made = one.preprocess(texts=texts, output_prefix=tmp_path / "o", append_eod=True)
    assert bytes_of_pair(made["text"]) == bytes_of_pair(wanted["x"])
    with pytest.raises(ZeroDivisionError):
        one.preprocess(texts=(1 / k for k in [0]), output_prefix=tmp_path / "d")
    assert not list(tmp_path.glob("d*"))


@linux
@pytest.mark.parametrize(
    "first, second, number", [("1", "13", signal.SIGTERM), ("13", "13", signal.SIGKILL)]
)
def test_a_killed_worker_is_an_error_and_no_hang(one, tmp_path, first, second, number):
    """And the other one ends."""

    def kill_at_13(text):
        if text == "13":
            os.kill(os.getpid(), number)

    long = "5 " * 300_000  # it ends the block of a worker
    path = jsonl(tmp_path / "a.jsonl", [first, long, second, long])
    before = set(multiprocessing.active_children())
    with pytest.raises(ChildProcessError, match="use fewer workers"):
        one.preprocess(path, tmp_path / "o", Acting(kill_at_13), workers=2)
    assert os.listdir(tmp_path) == ["a.jsonl"]
    assert set(multiprocessing.active_children()) <= before


ENDLESS = """
import sys
import megatron_min

def texts():
    while True:
        yield "a" * 1000

megatron_min.preprocess(texts=texts(), output_prefix=sys.argv[1], workers=3)
"""


def workers_of(process):
    """The numbers of the processes that a process has started, on Linux."""
    path = f"/proc/{process}/task/{process}/children"
    return [int(number) for number in pathlib.Path(path).read_text().split()]


def is_running(process):
    """Does a process run, and is no zombie?"""
    try:
        return ") Z " not in pathlib.Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def in_a_minute(happened, *arguments):
    """Wait until happened(*arguments) is true, for a minute at most."""
    end = time.monotonic() + 60
    while not happened(*arguments):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


@linux
def test_workers_end_with_a_job_that_is_killed(tmp_path):
    """At any moment, and though no parent ends them."""
    arguments = [sys.executable, "-c", ENDLESS, str(tmp_path / "o")]
    variables = os.environ | {"PYTHONPATH": str(HERE)}
    parent = subprocess.Popen(arguments, env=variables, stderr=subprocess.DEVNULL)
    try:
        in_a_minute(lambda: len(workers_of(parent.pid)) == 3)
        workers = workers_of(parent.pid)
        time.sleep(np.random.default_rng().random())
    finally:
        parent.kill()
        parent.wait()
    in_a_minute(lambda: not any(map(is_running, workers)))
    assert not os.path.exists(tmp_path / "o_text_document.bin")


@linux
def test_a_disk_that_is_full_at_any_moment(one, tmp_path):
    """Here files may not grow beyond a size: the pair of both keys is there, or none is."""
    resource = importlib.import_module("resource")
    path = tmp_path / "a.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for rng in cases(6):
            lines = int(rng.integers(100, 6000))  # of 200 bytes in the .bin
            path.write_bytes(b'{"text": "%s", "b": "cc"}\n' % (b"x" * 100) * lines)
            limit = int(rng.integers(1, 190 * lines))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            keys = {"json_keys": ["text", "b"], "workers": int(rng.integers(1, 3))}
            with pytest.raises(OSError):
                one.preprocess(path, tmp_path / "o", **keys)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert os.listdir(tmp_path) == ["a.jsonl"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_memory_of_a_long_line(one, tmp_path):
    """A text of one line takes few times its size; as a list of ids it would be 26 times."""
    size = 4_000_000
    path = jsonl(tmp_path / "a.jsonl", ["x" * size])
    tracemalloc.start()
    one.preprocess(path, tmp_path / "o")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * size


def test_what_is_said_of_an_input_shows_no_credential(one, tmp_path):
    for name, content, words in (
        ("a.jsonl.gz", b"nothing", "cannot be read"),
        ("a.jsonl", b"oops", "line 1"),
        ("a.jsonl.ZIP", b"", "zip archive"),
        ("none.jsonl", None, "no such file"),
    ):
        path = f"/me:s3cret@b/{name}?sig=s3cret"
        if content is not None:
            fsspec.filesystem("memory").pipe_file(path, content)
        with pytest.raises((ValueError, OSError), match=words) as refusal:
            one.preprocess(f"memory:/{path}", tmp_path / "o")
        assert f"memory://b/{name}" in str(refusal.value)
        assert "s3cret" not in str(refusal.value)


# ==============================================================================
# 19. Fine-tuning data
# ==============================================================================


class ChatTokenizer(Tok):
    """A tokenizer with a template of its own, as upstream's for fine-tuning have."""

    def tokenize_conversation(self, conversation, return_target, add_generation_prompt):
        assert return_target and not add_generation_prompt
        tokens = []
        targets = []
        for message in conversation:
            numbers = self.tokenize(message["content"])
            tokens += numbers
            learned = message["role"] == "assistant"
            targets += numbers if learned else [-100] * len(numbers)
        return np.array(tokens), np.array(targets)


def chat(one, path, n=None, rows=None, **fields):
    """An SFTDataset of n samples over all (or the given) rows of a file; S = 8."""
    fields = {"tokenizer": ChatTokenizer(pad=999)} | fields
    cfg = config(one, ([str(path)], None), **fields)
    opened = one.SFTDataset.build_low_level_dataset(str(path), cfg)
    rows = np.arange(len(opened), dtype=np.int32) if rows is None else np.array(rows, np.int32)
    return one.SFTDataset(opened, str(path), rows, n, one.Split.train, cfg)


ROW = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
ADDS_BOS = {"add_special_tokens": True}


def write_rows(path, rows):
    """A file of JSON lines with these rows, each a list of messages -> its path."""
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return path


def random_rows(rng, count, longest):
    """Rows of one to five conversations each, of numbers for ChatTokenizer."""
    rows = []
    for _ in range(count):
        messages = []
        for _ in range(rng.integers(1, 6)):
            roles = ["system", "user", "assistant"][rng.integers(0, 2) :]
            for role in roles[: rng.integers(1, 4)]:
                numbers = rng.integers(1, 50, rng.integers(1, longest))
                messages.append({"role": role, "content": " ".join(map(str, numbers))})
        rows.append(messages)
    return rows


def brute_chat_sample(messages, S, pad, eod, cp):
    """A sample by the rules of upstream, one after the other, on a list."""
    fill = eod if pad is None else pad
    conversations = []
    for message in messages:
        if message["role"] == "system" or not conversations:
            conversations.append([])
        conversations[-1].append(message)
    places = []  # token, target, position, is it filled up?
    ends = [0]
    for conversation in conversations:
        position = 0
        for message in conversation:
            for number in message["content"].split():
                target = int(number) if message["role"] == "assistant" else -100
                places.append((int(number), target, position, False))
                position += 1
        while cp > 1 and len(places) % (2 * cp):
            places.append((fill, fill, position, True))
            position += 1
        ends.append(len(places))
        if len(places) > S:
            places = places[:S]
            break
    while len(places) < S + 1:
        places.append((fill, fill, position, True))
        position += 1
    ends[-1] = S
    tokens, targets, positions, filled = zip(*places, strict=True)
    loss_mask = []
    for label, is_filled in zip(targets[1:], filled[1:], strict=True):
        is_padding = is_filled if pad is None else label == pad
        loss_mask.append(0.0 if is_padding or label == -100 else 1.0)
    longest = max(end - begin for begin, end in itertools.pairwise(ends))
    return {
        "tokens": np.array(tokens[:-1]),
        "labels": np.array(targets[1:]),
        "loss_mask": np.array(loss_mask, np.float32),
        "position_ids": np.array(positions[:-1]),
        "cu_seqlens": np.array((ends + [S] * (S + 1))[: S + 1], np.int32),
        "max_seqlen": np.array(longest, np.int32),
    }


@pytest.mark.parametrize("pad", [999, None, 7])
def test_samples_of_conversations_equal_the_rules(one, tmp_path, pad):
    """Also where real tokens equal the pad id (7), and where eod (0) fills for want of a pad.

    A tokenizer with a template of its own may add special tokens.
    """
    for rng in cases(40):
        rows = random_rows(rng, int(rng.integers(1, 6)), int(rng.choice([2, 3, 12])))
        rows.append([{"role": "system", "content": "5"}] * 3)  # of which two may fit
        S = int(2 ** rng.uniform(0, 5))
        cp = int(rng.integers(1, 4))
        path = write_rows(tmp_path / "chat.jsonl", rows)
        tokenizer = ChatTokenizer(pad=pad, unique_identifiers=ADDS_BOS)
        fields = {"sequence_length": S, "context_parallel_size": cp, "tokenizer": tokenizer}
        ds = chat(one, path, 2 * len(rows), **fields)
        for k in range(len(ds)):
            wanted = brute_chat_sample(rows[k % len(rows)], S, pad, 0, cp)
            same_samples(ds[k], wanted, (rows[k % len(rows)], S, cp))
        same_samples(ds[None], {**ds[0], "loss_mask": torch.zeros(S)})


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_found_wherever_they_lie(one, tmp_path, kind):
    """Lines of all lengths, blank lines, those of Windows, a last one without an end, a mark."""
    for rng in cases(30):
        wanted = random_rows(rng, int(rng.integers(1, 9)), 30)
        path = tmp_path / f"chat.{kind}"
        if kind == "parquet":
            write_parquet(path, {"messages": wanted}, row_group_size=int(rng.integers(1, 5)))
        else:
            ends = ["\n", "\r\n", "\n \t\r\n\n"]
            content = str(rng.choice(["", "\n\n", "\ufeff"]))
            for messages in wanted:
                content += json.dumps({"messages": messages}) + str(rng.choice(ends))
            path.write_bytes(content.removesuffix("\n").encode())
        found = one.SFTDataset.build_low_level_dataset(str(path), None)
        assert [found[row]["messages"] for row in range(len(found))] == wanted
        copy_of_rows = pickle.loads(pickle.dumps(found))
        for row in rng.permutation(len(found)).tolist():
            assert copy_of_rows[row]["messages"] == wanted[row]


def test_no_row_is_kept_in_memory(one, tmp_path):
    row = [{"role": "user", "content": "1 " * 10_000}]
    path = write_rows(tmp_path / "chat.jsonl", [row] * 200)
    tracemalloc.start()
    rows = one.SFTDataset.build_low_level_dataset(str(path), None)
    assert rows[199] == {"messages": row}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2


BAD_ROWS = {  # a line, and a word of the error
    "{oops": "Expecting",
    '{"text": "a"}': "KeyError: 'messages'",
    '{"messages": []}': "empty",
    '{"messages": [{"role": "user", "content": null}]}': "wanted texts",
    '{"messages": [{"role": "user", "content": "one"}]}': "invalid literal",
}


def test_a_row_that_cannot_be_used_is_named(one, tmp_path):
    good = json.dumps({"messages": ROW})
    path = tmp_path / "chat.jsonl"
    path.write_text("\n\n".join([good, *BAD_ROWS, good]))  # with blank lines
    ds = chat(one, path, tokenizer=Tok())
    assert len(ds) == len(BAD_ROWS) + 2
    for number, words in enumerate(BAD_ROWS.values(), 1):
        with pytest.raises(ValueError, match=rf"chat\.jsonl, line {2 * number + 1}: .*{words}"):
            ds[number]


def test_rows_of_any_object(one):
    """A list of dicts will do; its rows count from 1 in errors.

    One target for three tokens would be spread over all of them without a word.
    """
    rows = [{"messages": ROW}, {"text": "a"}]
    tokenizer = ChatTokenizer(pad=999)
    cfg = config(one, tokenizer=tokenizer)
    ds = one.SFTDataset(rows, "rows", np.arange(2, dtype=np.int32), 3, one.Split.train, cfg)
    same_samples(ds[2], brute_chat_sample(ROW, 8, 999, 0, 1))
    with pytest.raises(ValueError, match="rows, row 2: "):
        ds[1]
    tokenizer.tokenize_conversation = lambda *_, **__: ([1, 2, 3], [5])
    ds = one.SFTDataset(rows, "rows", np.arange(2, dtype=np.int32), 3, one.Split.train, cfg)
    with pytest.raises(ValueError, match=r"rows, row 1: .*3 tokens have 1 targets"):
        ds[0]


def test_what_fine_tuning_refuses(one, tmp_path):
    path = write_rows(tmp_path / "chat.jsonl", [ROW])
    for fields, words in (
        ({"create_attention_mask": True}, "create_attention_mask must be False"),
        ({"reset_position_ids": True}, "reset_position_ids must be False"),
        ({"n": 3, "rows": []}, "holds no rows for 3 samples"),
        ({"tokenizer": Tok(unique_identifiers=ADDS_BOS)}, "without add_special_tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            chat(one, path, **fields)


def test_without_a_template_of_the_tokenizer_there_is_a_plain_one(one, tmp_path):
    """Lines of role and content; what the assistant says, and the eod behind it, are learned."""
    turns = [("system", "be brief"), ("user", "2+2"), ("assistant", "4")]
    turns += [("user", "3+3"), ("assistant", "six")]
    messages = [{"role": role, "content": content} for role, content in turns]
    text = "system: be brief\nuser: 2+2\nassistant: 4$user: 3+3\nassistant: six$"  # $ is eod
    path = write_rows(tmp_path / "chat.jsonl", [messages])
    sample = chat(one, path, sequence_length=len(text), tokenizer=one.ByteTokenizer())[0]
    ids = [256 if letter == "$" else ord(letter) for letter in text]
    assert sample["tokens"].tolist() == ids
    learned = np.flatnonzero(sample["loss_mask"])
    assert "".join(text[i + 1] for i in learned) == "4$six$"
    assert sample["labels"][learned].tolist() == [ids[i + 1] for i in learned]


def test_fine_tuning_sets_in_builder_blend_loader_and_resume(one, tmp_path):
    """A run goes on where it stopped, and not with another file under the same name."""
    rng = np.random.default_rng(0)
    rows = random_rows(rng, 20, 5)
    paths = [str(write_rows(tmp_path / name, rows)) for name in "ab"]
    cfg = config(one, (paths, [1, 3]), split="8,1,1", tokenizer=ChatTokenizer(pad=999))
    train, valid, test = build(one, [24, 4, 0], cfg, one.SFTDataset)
    assert (len(train), len(valid), len(test)) == (24, 4, 0)
    assert [len(part.indices) for part in (*train.datasets, *valid.datasets)] == [16, 16, 2, 2]
    arguments = {"micro_batch_size": 4, "num_workers": 2, "dataloader_type": "cyclic"}
    batches = list(one.build_pretraining_data_loader(train, 0, **arguments))
    assert batches[0]["cu_seqlens"].shape == (4, 9)
    first = one.build_pretraining_data_loader(train, 0, **arguments)
    iterator = iter(first)
    for wanted in batches[:3]:
        same_samples(next(iterator), wanted)
    state = first.state_dict()
    later = one.build_pretraining_data_loader(train, 0, **arguments)
    later.load_state_dict(state)
    for found, wanted in zip(later, batches[3:], strict=True):
        same_samples(found, wanted)
    write_rows(tmp_path / "a", rows[::-1])
    changed, _, _ = build(one, [24, 4, 0], cfg, one.SFTDataset)
    other = one.build_pretraining_data_loader(changed, 0, **arguments)
    with pytest.raises(ValueError, match="does not fit"):
        other.load_state_dict(state)


def test_files_of_rows_are_told_apart(one, tmp_path):
    """By their sizes and both ends; and the sets of one file by their rows."""
    path = tmp_path / "chat.jsonl"
    long = [{"role": "user", "content": "1 " * 70_000}]
    found = []
    for rows in ([ROW, long, ROW], [ROW[::-1], long, ROW], [ROW, long, ROW[::-1]], [ROW, ROW]):
        write_rows(path, rows)
        found.append(chat(one, path).made_from())
    assert found[0]["size"] == found[1]["size"] == found[2]["size"]
    found.append(chat(one, path, rows=[1]).made_from())
    for one_of_them, another in itertools.combinations(found, 2):
        assert one_of_them != another


def test_parquet_files_of_no_use(one, tmp_path, monkeypatch):
    """Damaged, without messages, missing; and any, without the extra that reads them."""
    pytest.importorskip("pyarrow.parquet")
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"nothing")
    other = write_parquet(tmp_path / "other.parquet", {"text": ["a"]})
    for path in (damaged, pathlib.Path(other), tmp_path / "none.parquet"):
        with pytest.raises(ValueError, match=path.name):
            chat(one, path)
    missing = mock.Mock(side_effect=ModuleNotFoundError(name="pyarrow"))
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"damaged\.parquet.*megatron-min\[storage\]"):
        chat(one, damaged)


# ==============================================================================
# 20. Audit
# ==============================================================================


def mk_sentences(mm, prefix, rng):
    """A pair whose documents have 0 to 3 sequences, some of which are empty -> its prefix."""
    with mm.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for _ in range(rng.integers(3, 12)):
            lengths = rng.integers(0, 9, rng.integers(0, 4)).tolist()
            builder.add_document(rng.integers(0, 50, sum(lengths)), lengths)
        builder.add_document([7] * 20, [20])
    return str(prefix)


def random_gpt(mm, folder, rng):
    """A GPTDataset of a random shape over a part of the sequences of such a pair."""
    prefix = mk_sentences(mm, folder / f"pair{rng.integers(10**9)}", rng)
    first = int(rng.integers(0, 2))
    documents = np.arange(first, len(mm.IndexedDataset(prefix)), dtype=np.int32)
    fields = {
        "sequence_length": int(rng.integers(1, 12)),
        "add_extra_token_to_sequence": bool(rng.integers(2)),
        "drop_last_partial_validation_sequence": bool(rng.integers(2)),
        "stable_order": bool(rng.integers(2)),
    }
    n = [None, 5, 40][rng.integers(3)]
    return gpt(mm, prefix, n, ["train", "valid"][rng.integers(2)], documents, **fields)


def check_spans(mm, ds, k):
    """The spans of a sample are its tokens, one after the other, and are where they say."""
    tokens, _ = ds._query_document_sample_shuffle_indices(k)
    in_file = np.fromfile(f"{ds.dataset_path}.bin", np.uint16)
    bounds = ds.dataset.document_indices
    at = 0
    for span in mm.trace(ds, k):
        assert span.path_prefix == ds.dataset_path and span.length > 0
        assert span.sample_offset == at
        assert bounds[span.document] <= span.sequence < bounds[span.document + 1]
        first, rest = divmod(span.byte_offset, 2)
        part = tokens[at : at + span.length].tolist()
        assert rest == 0 and in_file[first : first + span.length].tolist() == part
        assert ds.dataset.get(span.sequence, span.offset, span.length).tolist() == part
        at += span.length
    assert set(tokens[at:].tolist()) <= {ds._pad_token_id}


def samples_with(mm, ds, prefix, sequence):
    """What find() should give, by tracing all samples."""
    found = []
    for k in range(len(ds)):
        places = {(span.path_prefix, span.sequence) for span in mm.trace(ds, k)}
        if (prefix, sequence) in places:
            found.append(k)
    return found


def test_trace_and_find_of_random_datasets(mm, tmp_path):
    for rng in cases(25):
        ds = random_gpt(mm, tmp_path, rng)
        for k in range(len(ds)):
            check_spans(mm, ds, k)
        for sequence in range(len(ds.dataset)):
            wanted = samples_with(mm, ds, ds.dataset_path, sequence)
            assert mm.find(ds, ds.dataset_path, sequence) == wanted


KINDS_OF_BLENDS = {  # weights of three corpora, a size, and fields of the config
    "weights": ([5, 3, 0], 60, {}),
    "exhaustive": (None, None, {}),
    "phases": (None, None, {"blend_phases": [(10, [1, 1, 0]), (25, [0, 1, 3]), (5, [1, 1, 1])]}),
}


@pytest.mark.parametrize("kind", KINDS_OF_BLENDS)
def test_trace_and_find_of_blends(mm, tmp_path, kind):
    """Also of a pair that is in the blend twice."""
    weights, size, fields = KINDS_OF_BLENDS[kind]
    rng = np.random.default_rng(1)
    a, b = (mk_sentences(mm, tmp_path / name, rng) for name in "ab")
    cfg = config(mm, ([a, b, a], weights), stable_order=kind == "phases", **fields)
    blend = build(mm, [size, 0, 0], cfg)[0]
    for i in range(len(blend)):
        part = blend.datasets[blend.dataset_index[i]]
        assert mm.trace(blend, i) == mm.trace(part, blend.dataset_sample_index[i]) != []
    assert mm.trace(blend, -1) == mm.trace(blend, len(blend) - 1)
    for prefix in (a, b):
        for sequence in range(len(mm.IndexedDataset(prefix))):
            wanted = samples_with(mm, blend, prefix, sequence)
            assert mm.find(blend, prefix, sequence) == wanted


def test_find_looks_at_a_few_samples_an_epoch(one, tmp_path):
    prefixes = [mk(one, tmp_path / name, [[1] * 9] * 40) for name in "ab"]
    blend = build(one, [400, 0, 0], config(one, (prefixes, [1, 1])))[0]
    part = blend.datasets[1]
    num_epochs = part.epoch_plan.num_epochs
    for sequence in range(40):
        with mock.patch.object(part, "pieces", wraps=part.pieces) as pieces:
            found = one.find(blend, prefixes[1], sequence)
        assert len(found) >= num_epochs > 1
        assert pieces.call_count <= 3 * num_epochs < len(part) / 10


def test_an_audit_reads_no_token(one, web, some_pair, tmp_path):
    """Nor does building: the .bin on the server is asked for its size, and for no bytes."""
    prefix = web.put(some_pair[0])
    cfg = config(one, ([prefix], None), path_to_cache=str(tmp_path / "cache"))
    ds = build(one, [9, 0, 0], cfg)[0]
    [span, *_] = one.trace(ds, 3)
    assert 3 in one.find(ds, prefix, span.sequence)
    methods = {method for method, name, _ in web.server.requests if name == "pair.bin"}
    assert methods == {"HEAD"}


def test_what_cannot_be_traced_or_found(one, tmp_path):
    a = mk(one, tmp_path / "a", [[1] * 9] * 9)
    ds = gpt(one, a, 5, documents=np.arange(4, dtype=np.int32))
    blend = build(one, [5, 0, 0], config(one, ([a, a], [1, 1])))[0]
    assert one.find(ds, a, 8) == []  # of another split
    for function, arguments, kind, words in (
        (one.find, [blend, "other", 1], ValueError, f"other is not a pair.*{re.escape(a)}"),
        (one.find, [ds, a, 9], IndexError, "9"),
        (one.trace, [ds, len(ds)], IndexError, str(len(ds))),
        (one.trace, [blend, len(blend)], IndexError, str(len(blend))),
    ):
        with pytest.raises(kind, match=words):
            function(*arguments)


def test_mock_data_have_no_file(one):
    ds = build(one, [10, 0, 0], config(one, sequence_length=4096), one.MockGPTDataset)[0]
    [*_, last] = one.trace(ds, 0)
    assert (last.path_prefix, last.byte_offset, last.document) == (None, None, last.sequence)
    assert 0 in one.find(ds, None, last.sequence)


# ==============================================================================
# 21. The command line
# ==============================================================================


def test_commands_by_hand(one, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jsonl("a.jsonl", ["aaaa", "bbb", "cccccc"])
    mk(one, tmp_path / "none", [])
    with one.IndexedDatasetBuilder("modes.bin", multimodal=True) as builder:
        builder.add_document([1, 2, 3], [2, 1], [0, 5])
    prefix = "toy_text_document"
    inspected = ["13 tokens of uint16", "3 to 6 tokens, 4.3", "[97, 97, 97, 97]\n", "'aaaa'"]
    for line, words in (
        ("preprocess --help", ["usage: megatron-min preprocess"]),
        ("preprocess --input a.jsonl --output-prefix eod --append-eod", ["3 documents, 16 tokens"]),
        ("preprocess --input a.jsonl --output-prefix toy", [f"{prefix}: 3 sequences"]),
        (f"inspect {prefix}", inspected),
        ("inspect none", ["0 sequences, 0 documents, 0 tokens"]),
        (f"inspect {prefix} --tokenizer null:9", ["not decoded"]),
        (f"verify {prefix} modes", [f"whole: {prefix}: 3 sequences, 3 documents, 13 ", "modes: 2"]),
        (f"merge --input {prefix} {prefix}.idx --output-prefix two", ["26 tokens"]),
        ("merge --input modes --output-prefix q --multimodal", ["2 sequences"]),
    ):
        code, out, err = command(one, capsys, *line.split())
        assert code == 0, err
        for word in words:
            assert word in out, line
    assert len(one.IndexedDataset("two", check=True)) == 6
    assert one.IndexedDataset("q", multimodal=True).sequence_modes.tolist() == [0, 5]


def test_options_of_preprocess_reach_the_function(one, capsys, monkeypatch):
    """Each of them; those that are not given have the function's defaults, but for verbose."""
    made = mock.Mock(return_value={})
    defaults = inspect.signature(one.preprocess).parameters
    monkeypatch.setattr(one, "preprocess", made)
    argv = ["preprocess", "--input", "x", "-", "--output-prefix", "o", "--tokenizer", "null:9"]
    flags = "--append-eod --json-keys a b --split-sentences --workers 3 --shard 2/5 --on-error skip"
    assert command(one, capsys, *argv, *flags.split(), "--no-verbose")[0] == 0
    (inputs, prefix, tokenizer), found = made.call_args
    assert (inputs, prefix, tokenizer.vocab_size) == (["x", "-"], "o", 10)
    wanted = {"append_eod": True, "json_keys": ["a", "b"], "split_sentences": True, "workers": 3}
    assert found == wanted | {"shard": (2, 5), "on_error": "skip", "verbose": False}
    assert command(one, capsys, *argv)[0] == 0
    wanted = {name: defaults[name].default for name in found}
    assert made.call_args.kwargs == wanted | {"json_keys": ["text"], "verbose": True}


def test_wrong_use_is_one_sentence(one, tmp_path, monkeypatch, capsys):
    """And it leaves no file."""
    monkeypatch.chdir(tmp_path)
    jsonl("a.jsonl", ["a"])
    for name in ("good", "damaged"):
        mk(one, tmp_path / name, [[1] * 18, [2] * 2])
    patch("damaged.idx", 34, b"\x13")  # the first length
    before = files_of(".")
    preprocess = "preprocess --output-prefix o --no-verbose --input a.jsonl"
    for arguments, code, word in (
        ("", 2, "COMMAND"),
        (f"{preprocess} --json-keys x", 1, "a.jsonl: line 1: "),
        (f"{preprocess} --shard 1", 2, "--shard"),
        ("merge --input good none --output-prefix o", 1, "none.idx"),
        ("verify good damaged", 1, "damaged.idx: sequence_pointers[1]"),
    ):
        found, _, err = command(one, capsys, *arguments.split())
        assert found == code and one_sentence(err) and word in err.split("\n")[-2]
        assert files_of(".") == before


def test_an_error_and_a_warning_are_a_line_each(one, capsys, monkeypatch):
    def merge(*arguments):
        warnings.warn("https://h/p?key=secret  is odd", stacklevel=1)
        raise ZeroDivisionError("a  bad\nvalue of s3://me:secret@b/c")

    monkeypatch.setattr(one, "merge", merge)
    code, _, err = command(one, capsys, "merge", "--input", "p", "--output-prefix", "q")
    sentence = "megatron-min: ZeroDivisionError: a bad value of s3://b/c\n"
    assert (code, err) == (1, f"warning: https://h/p is odd\n{sentence}")


SIGNALLED = """
import os, signal
class Signalled:
    vocab_size, eod, unique_identifiers = 9, 8, {}
    def tokenize(self, text):
        try:
            os.kill(os.getpid(), getattr(signal, text))
        finally:
            raise RuntimeError("cannot join thread before it is started")
"""


@linux
@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_unwinds_a_command(one, tmp_path, monkeypatch, capsys, name, code):
    """The tokenizer signals its own process, in the middle of the work: no file is left.

    Nor is there a message, though what the signal stops raises an error of its own.
    """
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "signalled", raising=False)
    path = jsonl(tmp_path / "a.jsonl", [name])
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    flags = ["--no-verbose", "--tokenizer", "signalled:Signalled"]
    found, _, err = preprocess_command(one, capsys, path, "o", *flags)
    assert signal.signal(signal.SIGTERM, before) is signal.SIG_DFL
    assert (found, err) == (code, "")
    assert {*os.listdir(tmp_path)} - {"__pycache__"} == {"a.jsonl", "signalled.py"}


@linux
def test_a_signal_while_a_file_is_made_leaves_none(one, tmp_path, monkeypatch, capsys):
    """It comes when the file is there, and nobody has it yet."""

    def open_and_signal(path, mode="r", *arguments, **options):
        file = open(path, mode, *arguments, **options)
        if mode == "xb":
            os.kill(os.getpid(), signal.SIGTERM)
        return file

    prefix = mk(one, tmp_path / "p", [[1]])
    monkeypatch.setattr(one, "open", open_and_signal, raising=False)
    monkeypatch.chdir(tmp_path)
    before = files_of(tmp_path)
    code, _, err = command(one, capsys, "merge", "--input", prefix, "--output-prefix", "o")
    assert (code, err) == (143, "") and files_of(tmp_path) == before


def test_the_demo_resumes_and_leaves_nothing(mm, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, out, err = command(mm, capsys, "demo")
    assert code == 0, err
    assert "600 samples of 256 tokens" in out and "70 more steps, equal: True\n" in out
    assert os.listdir(tmp_path) == []


def test_the_module_is_imported_where_numpy_and_torch_are(monkeypatch):
    """Without what Linux alone has, and without the packages of the extras."""
    extras = ["gigatoken", "nltk", "pyarrow", "s3fs", "tokenizers", "tqdm"]
    for name in ("fcntl", "resource", *extras):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("pread", "fork", "sched_getaffinity", "mkfifo"):
        monkeypatch.delattr(os, name, raising=False)
    assert "main" in runpy.run_path(str(HERE / "megatron_min.py"))


# -- Long tests: real processes, closed pipes, kills -------------------------------------------


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    "redirected, code, word", [(">/dev/full", 1, "[Errno 28] No space left"), ("| :", 0, "")]
)
def test_what_is_printed_cannot_be_written(one, tmp_path, redirected, code, word):
    """A reader that has seen enough is no error; no room is one, with the pair that is made."""
    jsonl(tmp_path / "a.jsonl", ["abc"])
    run = [sys.executable, "-E", str(HERE / "megatron_min.py")]  # -E: with a buffer, in any case
    run += ["preprocess", "--input", "a.jsonl", "--output-prefix", "o", "--no-verbose"]
    script = f'"$@" {redirected}; exit ${{PIPESTATUS[0]}}'
    run = ["bash", "-c", script, "bash", *run]
    ran = subprocess.run(run, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert ran.returncode == code and word in ran.stderr
    assert ran.stderr.count("\n") == code  # lines, too
    assert texts_of(one, tmp_path / "o_text_document") == [[97, 98, 99]]


def is_gone(group):
    """Has a group of processes no process any more?"""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def write_out(mm, generation):
    """A pair of one of two corpora, in the folder out, by a command with workers."""
    line = f"preprocess --input {generation}.jsonl --output-prefix out/p --workers 2 --no-verbose"
    assert mm.main(line.split()) == 0


def write_until_stopped(mm):
    os.setpgrp()
    for generation in itertools.cycle([1, 0]):
        write_out(mm, generation)


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    "send, number",
    [
        (os.kill, signal.SIGKILL),
        (os.kill, signal.SIGTERM),
        (os.killpg, signal.SIGINT),  # to all processes, as from a terminal
    ],
    ids=["killed", "sigterm", "ctrl-c"],
)
def test_a_stopped_writer_leaves_whole_files_and_no_process(
    one, tmp_path, monkeypatch, send, number
):
    """At any moment: each file is whole or absent, and so is each pair; a new run is right."""
    monkeypatch.chdir(tmp_path)
    wanted = []
    for generation in range(2):
        docs = random_docs(np.random.default_rng(generation), 40, 30)
        jsonl(f"{generation}.jsonl", [" ".join(map(str, doc)) for doc in docs] * 1000)
        os.mkdir("out")
        write_out(one, generation)
        wanted.append(files_of("out"))
        shutil.rmtree("out")
    for moment in cases(5):
        os.mkdir("out")
        process = FORK.Process(target=write_until_stopped, args=[one])
        quiet(process.start)
        in_a_minute(os.listdir, "out")
        time.sleep(moment.random())
        for _ in range(20):  # a Ctrl-C that arrives while Python forks is lost
            if process.is_alive():
                send(process.pid, number)
                process.join(5)
        in_a_minute(is_gone, process.pid)
        found = files_of("out")
        for name in found:
            if name.endswith(".tmp"):
                assert number == signal.SIGKILL
                continue
            parts = [name, name.replace(".idx", ".bin")]  # of a pair; else the file twice
            generations = [[made.get(part) for part in parts] for made in wanted]
            assert [found[part] for part in parts] in generations, name
        write_out(one, 0)
        assert wanted[0].items() <= files_of("out").items()
        shutil.rmtree("out")


# ==============================================================================
# Parity with megatron-core 0.16.1
# ==============================================================================
# Every test here runs one thing twice, with our names (mm or one) and with upstream's (up), and
# compares all that comes of it.


# -- Functions: the same result, and the same left of the arguments ----------------------------


def same_outcome(found, wanted, note=""):
    """Equal results: arrays with their dtypes, and plain values, also nested."""
    if isinstance(wanted, np.ndarray):
        same(found, wanted, note)
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            same_outcome(mine, theirs, note)
    else:
        assert type(found) is type(wanted) and found == wanted, note


def test_splits_and_blends_equal_upstreams(one, up):
    """Shares of which at least one is not 0, and what is missing is 0; paths with weights."""
    for blend in (None, ["a"], ["a", "b", "c"], ["1", "a"], ["0.3", "a", "7e1", "b"]):
        same_outcome(one.get_blend_from_list(blend), up.get_blend_from_list(blend), blend)
    for rng in cases(300):
        shares = rng.integers(0, 100, 3) * (rng.random(3) < 0.8) + [1, 0, 0]
        if rng.random() < 0.5:
            shares = rng.random(3).round(3)
        text = ",".join(str(share) for share in shares[: rng.integers(1, 4)])
        found = one.parse_and_normalize_split(text)
        same_outcome(found, up.parse_and_normalize_split(text), text)


def test_blending_indices_equal_upstreams(mm, up):
    """Weights with ties, near ties and tiny ones, normalized or not; mostly a few samples."""
    for rng in cases(300):
        n = int(rng.integers(1, 40))
        choices = [rng.random(n), rng.integers(1, 4, n), rng.dirichlet(np.full(n, 0.2)), np.ones(n)]
        weights = choices[rng.integers(4)] + 1e-9
        if rng.random() < 0.7:
            weights = weights / weights.sum()
        size = int(2000 ** rng.random())
        results = []
        for names in (mm, up):
            given = [np.full(size, -1, np.int16), np.full(size, -1, np.int64), weights.copy()]
            names.build_blending_indices(*given, n, size, False)
            results.append(given)
        same_outcome(*results, (weights, size))


def arguments_by_position(cls):
    """(name, default) of each argument but those that are keyword-only."""
    found = []
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            default = parameter.default
            if "factory" in str(default):  # of a field of a dataclass, each an object of its own
                default = "made by a function"
            found.append((parameter.name, default))
    return found


@pytest.mark.parametrize(
    "name",
    ["GPTDataset", "MockGPTDataset", "BlendedDataset", "BlendedMegatronDatasetBuilder"]
    + ["BlendedMegatronDatasetConfig", "GPTDatasetConfig"],
)
def test_arguments_of_classes_are_upstreams(one, up, name):
    """All of them, in upstream's order, with its defaults; ours alone come after."""
    theirs = arguments_by_position(getattr(up, name))
    assert arguments_by_position(getattr(one, name))[: len(theirs)] == theirs


# -- Files -------------------------------------------------------------------------------------


def write_somehow(names, folder, docs, dtype, multimodal, rng):
    """Documents of up to two sequences, by all ways to add them, and the pair appended twice."""
    folder.mkdir(exist_ok=True)
    prefix = str(folder / "pair")
    builder = names.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for doc in docs:
        tokens = torch.from_numpy(doc.astype(np.int64))
        cut = int(rng.integers(len(doc) + 1))
        modes = rng.integers(-128, 128, 2).tolist()
        if rng.random() < 0.5:
            lengths = [cut, len(doc) - cut]
            builder.add_document(tokens, lengths, modes if multimodal else None)
        else:
            builder.add_item(tokens[:cut], modes[0])
            builder.add_item(tokens[cut:], modes[1])
            builder.end_document()
    builder.finalize(f"{prefix}.idx")
    both = names.IndexedDatasetBuilder(f"{prefix}2.bin", dtype=dtype, multimodal=multimodal)
    both.add_index(prefix)
    both.add_index(prefix)
    both.finalize(f"{prefix}2.idx")
    return prefix


@pytest.mark.parametrize("multimodal", [False, True])
def test_files_equal_upstreams(one, up, tmp_path, multimodal):
    """Equal byte for byte, and each side reads what the other has written."""
    for rng in cases(12):
        dtype = rng.choice([np.uint8, np.int16, np.uint16, np.int32, np.int64])
        docs = [rng.integers(0, 100, rng.integers(0, 9)) for _ in range(rng.integers(1, 20))]
        docs.append(np.array([5]))
        seed = int(rng.integers(2**31))
        prefixes = []
        for names, folder in ((one, tmp_path / "ours"), (up, tmp_path / "theirs")):
            same_choices = np.random.default_rng(seed)
            prefix = quiet(write_somehow, names, folder, docs, dtype, multimodal, same_choices)
            prefixes.append(prefix)
        assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
        ours, theirs = prefixes
        by_us = one.IndexedDataset(theirs, multimodal)
        by_them = up.IndexedDataset(ours, multimodal=multimodal)
        for i in range(len(by_them)):
            same_outcome(by_us[i], by_them[i], (seed, i))
        same_outcome(by_us[:], by_them[:], seed)
        same(by_us.get_document_indices(), by_them.get_document_indices(), seed)
        del by_us, by_them  # the next case writes over their files


# -- Datasets ----------------------------------------------------------------------------------


def same_dataset(ours, theirs, note=""):
    """Two GPTDatasets: their indices, with dtypes."""
    assert len(ours) == len(theirs), note
    if len(theirs):
        quiet(theirs.__getitem__, 0)  # with defer_npy_index_mmap upstream has no arrays before
    for name in ("document_index", "sample_index", "shuffle_index"):
        same(getattr(ours, name), getattr(theirs, name), (note, name))


def same_items(ours, theirs, indices, note=""):
    """These samples of two datasets, alone and, of ours, as one batch."""
    theirs.masks_and_position_ids_are_cacheable = False  # else one sample's masks are in the next
    wanted = [quiet(theirs.__getitem__, k) for k in indices]
    for k, sample in zip(indices, wanted, strict=True):
        if "dataset_id" in sample:  # upstream: an int16, which gloo cannot send
            sample["dataset_id"] = torch.tensor(int(sample["dataset_id"]))
        found = quiet(ours.__getitem__, k)
        assert list(found) == list(sample), "in the same order"
        same_samples(found, sample, (note, k))
    if wanted:
        batch = torch.utils.data.default_collate(wanted)
        same_samples(quiet(ours.batch, indices), batch, note)


def random_num_samples(rng, tokens, flags):
    """One epoch, around its end, at the 80 % of a last one, or anything."""
    S = flags["sequence_length"]
    epoch = (tokens - flags["add_extra_token_to_sequence"]) // S
    around = [epoch, epoch + 1, int(epoch * 1.8), int(epoch * rng.uniform(1, 3))]
    choices = [None, 1, *around, int(rng.integers(1, 200))]
    n = choices[rng.integers(len(choices))]
    return None if n is None else max(1, n)


@pytest.mark.parametrize("split, failing", [("train", 0), ("valid", 2)])
def test_datasets_equal_upstreams(mm, up, tmp_path, split, failing):
    """Indices and samples, under every flag.

    Upstream: an AssertionError where a kept short sample ends in an empty document, with x = 1.
    """
    caches = [str(tmp_path / side) for side in ("ours", "theirs")]
    failed = 0
    for case, rng in enumerate(cases(61)):
        docs = [np.array([1, 2, 3])]
        for doc in random_docs(rng, vocab=int(rng.choice([9, 9, 250]))):
            docs.append(np.append(doc, 0) if rng.random() < 0.6 else doc)
        dtype = rng.choice([np.uint8, np.int16, np.uint16, np.int32, np.int64])
        prefix = mk(mm, tmp_path / f"pair{case}", docs, dtype)
        flags = random_parity_flags(rng)
        n = random_num_samples(rng, sum(map(len, docs)), flags)
        ours = quiet(gpt, mm, prefix, n, split, path_to_cache=caches[0], **flags)
        is_kept = split == "valid" and not flags["drop_last_partial_validation_sequence"]
        tokens = ours.epoch_plan.num_epochs * sum(map(len, docs)) - 1
        is_short = flags["add_extra_token_to_sequence"] and tokens % flags["sequence_length"] > 0
        if is_kept and is_short and len(docs[ours.document_index[-1]]) == 0:
            failed += 1
            with pytest.raises(AssertionError):
                quiet(gpt, up, prefix, n, split, path_to_cache=caches[1], **flags)
            continue
        theirs = quiet(gpt, up, prefix, n, split, path_to_cache=caches[1], **flags)
        same_dataset(ours, theirs, case)
        if len(ours):
            some = rng.integers(0, len(ours), 6).tolist()
            same_items(ours, theirs, some, case)
            found = ours._query_document_sample_shuffle_indices(some[0])
            same_outcome(found, theirs._query_document_sample_shuffle_indices(some[0]), case)
            same_samples(quiet(ours.__getitem__, None), quiet(theirs.__getitem__, None), case)
    assert failed == failing or CASES != 1


class LegacyMethods:
    """A tokenizer of upstream's old kind, whose base class implements nothing more."""

    vocab = inv_vocab = {}
    vocab_size = 1000
    eod = 0

    def tokenize(self, text):
        return [int(word) for word in text.split()]


def legacy_tokenizer(up):
    """One such tokenizer, made by upstream's base class; to ask it for pad is an error."""
    return quiet(type("Legacy", (LegacyMethods, up.MegatronLegacyTokenizer), {}), "file", size=9)


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("case", [*PADS_OF_TOK, "upstream's old kind"])
def test_padding_equals_upstreams(mm, up, tmp_path, case, allowed):
    """A tokenizer whose pad is None stops upstream; here it has no pad."""
    tokenizer = PADS[case][0] if case in PADS else legacy_tokenizer(up)
    prefix = mk(mm, tmp_path / "pair", [[5, 6, 0, 8, 7, 9, 3]])
    for extra in (True, False):
        given = {
            "allow_ambiguous_pad_tokens": allowed,
            "drop_last_partial_validation_sequence": False,
            "add_extra_token_to_sequence": extra,
            "eod_mask_loss": not extra,
            "tokenizer": tokenizer,
            "sequence_length": 5,
        }
        datasets = []
        for names, folder in ((mm, f"ours{extra}"), (up, f"theirs{extra}")):
            cache = str(tmp_path / folder)
            datasets.append(quiet(gpt, names, prefix, None, "valid", path_to_cache=cache, **given))
        ours, theirs = datasets
        assert len(ours) == len(theirs) == 2
        same_items(ours, theirs, [0, 1], case)


@pytest.mark.parametrize("n, length, tokenizer", [(50, 64, Tok(999, 1000)), (3, 2000, Tok(0, 37))])
def test_mock_datasets_equal_upstreams(mm, up, n, length, tokenizer):
    built = []
    for names in (mm, up):
        cfg = config(names, sequence_length=length, tokenizer=tokenizer)
        built.append(quiet(build, names, [n, 2, 1], cfg, names.MockGPTDataset))
    for ours, theirs in zip(*built, strict=True):
        same_dataset(ours, theirs)
        same_items(ours, theirs, list(range(0, len(ours), max(1, len(ours) // 5))))


# -- The builder and the cache -----------------------------------------------------------------


def same_built(ours, theirs, note=""):
    """What the two builders made: for each split None, a dataset, a list of them, or a blend."""
    for mine, other in zip(ours, theirs, strict=True):
        assert type(mine).__name__ == type(other).__name__, note
        if mine is None:
            continue
        if isinstance(mine, list):
            same_built(mine, other, note)
            continue
        assert mine.unique_description == other.unique_description, note
        assert mine.unique_description_hash == other.unique_description_hash, note
        if type(mine).__name__ == "BlendedDataset":
            same_items(mine, other, list(range(0, len(mine), max(1, len(mine) // 4))), note)
            same(mine.dataset_index, other.dataset_index, note)
            same(mine.dataset_sample_index, other.dataset_sample_index, note)
            same_built(mine.datasets, other.datasets, note)
        else:
            same_dataset(mine, other, note)


@pytest.fixture
def six_corpora(mm, tmp_path):
    rng = np.random.default_rng(21)
    prefixes = []
    for name in "abcdef":
        docs = [rng.integers(1, 50, rng.integers(1, 40)) for _ in range(rng.integers(30, 90))]
        prefixes.append(mk(mm, tmp_path / "corpora" / name, docs, np.uint16))
    return prefixes


def random_corpora(rng, prefixes):
    """Up to five of the prefixes, with weights or without."""
    chosen = [str(prefix) for prefix in rng.choice(prefixes, rng.integers(1, 6), replace=False)]
    weights = rng.dirichlet(np.ones(len(chosen))) + 0.05
    if rng.random() < 0.3:
        weights = rng.integers(1, 5, len(chosen)).astype(float)
    if rng.random() < 0.4:
        return chosen, None
    return chosen, weights.tolist()


def random_build(rng, prefixes):
    """Random (sizes, fields of a config), in all modes that upstream's builder takes."""
    sizes = rng.integers(1, 400, 3).tolist()
    fields = {
        "sequence_length": int(rng.integers(4, 16)),
        "random_seed": int(rng.integers(9999)),
        "num_dataset_builder_threads": int(rng.integers(1, 3)),
    }
    if rng.random() < 0.5:
        fields["blend"] = random_corpora(rng, prefixes)
        fields["split"] = str(rng.choice(["8,1,1", "90,10,0", "1,0,0", "5,4,1"]))
        if fields["blend"][1] is None and rng.random() < 0.5:
            sizes = [None] * 3
        return sizes, fields
    blends = [random_corpora(rng, prefixes) if rng.random() < 0.8 else None for _ in range(3)]
    if not any(blends):
        blends[0] = random_corpora(rng, prefixes)
    fields["blend_per_split"] = blends
    valid = blends[1]
    is_unweighted = valid is not None and valid[1] is None
    if is_unweighted and len(valid[0]) > 1 and rng.random() < 0.6:
        fields["multiple_validation_sets"] = True
        fields["full_validation"] = bool(rng.integers(2))
        if fields["full_validation"]:
            sizes[1] = None
    elif rng.random() < 0.4:
        fields["full_validation"] = True
        if is_unweighted and rng.random() < 0.5:
            sizes[1] = None
    return sizes, fields


WAYS_TO_BUILD = [
    {},
    {"fast_cache_load": True},
    {"defer_npy_index_mmap": True},
    {"fast_cache_load": True, "defer_npy_index_mmap": True, "num_dataset_builder_threads": 3},
    {"fast_cache_load": True, "sequences_per_dataset": {}},
    {"mmap_bin_files": False, "num_dataset_builder_threads": 3},
    {"context_parallel_size": 2, "data_parallel_size": 4, "sequence_parallel_size": 2},
    {"object_storage_cache_path": None, "hybrid_context_parallel": False},
]


def test_built_datasets_and_caches_equal_upstreams(mm, up, six_corpora, tmp_path, group):
    """Every mode: the datasets, and each file of the cache byte for byte.

    Then each builds from the other's cache.  Upstream writes nothing; we write the same arrays
    again, with a manifest each.
    """
    counts = {}
    for prefix in six_corpora:
        pair = mm.IndexedDataset(prefix)
        counts[prefix] = len(pair), len(pair.document_indices)
    for case, rng in enumerate(cases(16)):
        sizes, fields = random_build(rng, six_corpora)
        fields["tokenizer"] = legacy_tokenizer(up)
        again = fields | WAYS_TO_BUILD[case % len(WAYS_TO_BUILD)]
        if "sequences_per_dataset" in again:
            again["sequences_per_dataset"] = counts
        if "blend" in fields:  # upstream trusts the cache of a blend for each split alone
            again["fast_cache_load"] = False
        note = case, sizes, again
        caches = [str(tmp_path / f"{case}{side}") for side in ("ours", "theirs")]
        ours = quiet(build, mm, sizes, config(mm, path_to_cache=caches[0], **fields))
        theirs = quiet(build, up, sizes, config(up, path_to_cache=caches[1], **fields))
        same_built(ours, theirs, note)
        files, arrays = (files_of(cache) for cache in caches)
        manifests = {name for name in files if name.endswith("-manifest.json")}
        assert arrays == {name: files[name] for name in files.keys() - manifests}, note
        before = stamps(caches[0])
        theirs = quiet(build, up, sizes, config(up, path_to_cache=caches[0], **again))
        assert stamps(caches[0]) == before, note
        ours = quiet(build, mm, sizes, config(mm, path_to_cache=caches[1], **again))
        same_built(ours, theirs, note)
        assert files_of(caches[1]).keys() == arrays.keys() | manifests, note
        assert arrays.items() <= files_of(caches[1]).items(), note


# -- Ranks and steps of a job ------------------------------------------------------------------


def test_groups_of_ranks_equal_upstreams(one, up):
    state = importlib.import_module("megatron.core.parallel_state")
    kinds = []
    for num_axes in range(1, 5):
        for axes in itertools.permutations(("tp", "cp", "dp", "pp"), num_axes):
            kinds.append("-".join(axes))
    for rng in cases(10):
        tp, cp, dp, pp = rng.integers(1, 6, 4).tolist()
        theirs = state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
        sizes = {"tensor": tp, "context": cp, "data": dp, "pipeline": pp}
        for kind in kinds:
            found = one.ParallelGroups.rank_lists(kind, **sizes)
            assert found == theirs.get_ranks(kind), (kind, sizes)


def test_parts_for_context_parallelism_equal_upstreams(one, up):
    """Where upstream works: no dataset_id, no cu_seqlens, S a multiple of 2 * cp."""
    utils = importlib.import_module("megatron.core.utils")
    for rng in cases(40):
        ranks, rows, chunk = rng.integers(1, 6, 3).tolist()
        rank = int(rng.integers(ranks))
        batch = hand_made_batch(rng, rows, 2 * ranks * chunk)
        if rng.random() < 0.5:
            del batch["attention_mask"]
        place = {"get_pg_rank": mock.Mock(return_value=rank)}
        place["get_pg_size"] = mock.Mock(return_value=ranks)
        with mock.patch.multiple(utils, **place):
            theirs = utils.get_batch_on_this_cp_rank(dict(batch), "a group")
        same_samples(one.get_batch_on_this_cp_rank(batch, rank, ranks), theirs, (rank, ranks))


def test_steps_of_the_ramp_up_equal_upstreams(one, up):
    for rng in cases(200):
        micro, ranks, steps = rng.integers(1, 5, 3).tolist()
        start, increment = (micro * ranks * rng.integers(1, 4, 2)).tolist()
        samples = int(rng.integers(1, 3000))
        final = start + steps * increment
        ours = one.NumMicroBatches(final, micro, ranks, (start, increment, samples))
        theirs = up.calculator.RampupBatchsizeNumMicroBatchesCalculator(
            final, micro, ranks, False, 0, start, increment, samples
        )
        more = rng.integers(0, samples + 50, 20).tolist()
        for consumed in sorted({0, samples, samples + 1, *more}):
            ours.update(consumed)
            theirs.update(consumed, True)
            found = ours.get(), ours.get_current_global_batch_size()
            wanted = theirs.get(), theirs.get_current_global_batch_size()
            assert found == wanted, (final, micro, ranks, start, increment, samples, consumed)


# -- What was written for upstream -------------------------------------------------------------


def backwards(names):
    """A class as scripts have them: its samples are read backwards, and have an image."""

    class Backwards(names.GPTDataset):
        def _query_document_sample_shuffle_indices(self, idx):
            assert self._pad_token_id == -1
            tokens, documents = super()._query_document_sample_shuffle_indices(idx)
            return tokens[::-1].copy(), documents

        def __getitem__(self, idx):
            sample = super().__getitem__(idx)
            sample["image"] = torch.full((2, 3), idx)
            return sample

    return Backwards


@pytest.mark.parametrize("extra", [True, False], ids=["x1", "x0"])
def test_a_subclass_written_for_upstream_works_here(mm, up, tmp_path, extra):
    """Samples of its own, in a loader's batches."""
    prefix = mk(mm, tmp_path / "p", [np.arange(1, 40), np.arange(40, 50), np.arange(50, 99)])
    fields = {"add_extra_token_to_sequence": extra, "drop_last_partial_validation_sequence": False}
    fields |= {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    fields |= {"create_attention_mask": True, "blend_per_split": [None, ([prefix], None), None]}
    built = []
    for names, folder in ((mm, "ours"), (up, "theirs")):
        cfg = config(names, path_to_cache=str(tmp_path / folder), **fields)
        built.append(quiet(build, names, [0, 20, 0], cfg, backwards(names))[1])
    ours, theirs = built
    theirs.masks_and_position_ids_are_cacheable = False
    loader = mm.build_pretraining_data_loader(ours, 0, micro_batch_size=1)
    for k, batch in enumerate(loader):
        wanted = quiet(theirs.__getitem__, k)
        same_samples({key: values[0] for key, values in batch.items()}, wanted, k)
    same_dataset(ours, theirs)


def test_states_of_a_rerun_data_iterator_have_upstreams_keys(one, up):
    ours = one.RerunDataIterator(iter(range(9)))
    theirs = up.rerun.RerunDataIterator(iter(range(9)))
    for numbers in (ours, theirs):
        numbers.advance()
    assert ours.state_dict() == theirs.state_dict()
    theirs.load_state_dict({"saved_microbatches": [5, 6], "replaying": True, "replay_pos": 1})
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()
    assert next(ours) == next(theirs) == 6


# ==============================================================================
# Hostile files
# ==============================================================================


class LeavesATrace:
    """What unpickles it makes the file "ran"."""

    def __reduce__(self):
        return open, ("ran", "w")


def damaged_bytes(rng, data, other):
    """Data of a file, damaged; other is that of another file."""
    room = rng.choice([40, 200, len(data)])  # in the header of a file, or of an .npy, or anywhere
    at = int(rng.integers(min(len(data), room) + 1))
    flipped = bytes(byte ^ 1 << int(rng.integers(8)) for byte in data[at : at + 1])
    number = struct.pack("<q", int(rng.choice(FORGED)))[: rng.choice([4, 8])]
    decimal = re.sub(rb"\d+", b"%d" % rng.choice(FORGED), data[at:], count=1)  # as JSON has it
    code = io.BytesIO()
    np.lib.format.write_array(code, np.array([LeavesATrace()], object), allow_pickle=True)
    damages = [
        data[:at] + flipped + data[at + 1 :],
        data[:at] + number + data[at + len(number) :],
        data[:at] + decimal,
        data[:at],
        data[:at] + data[at + 8 :],
        data[:at] + other[:40] + data[at + 40 :],
        data + other[:1],
        other,
        pickle.dumps(LeavesATrace()),
        code.getvalue(),
    ]
    return damages[rng.integers(len(damages))]


def put_files(files):
    """Make these the files of the current folder; their times tell nothing of a damage."""
    for path in files_of("."):
        os.unlink(path)
    for path, data in files.items():
        pathlib.Path(path).write_bytes(data)
        os.utime(path, ns=(1, 1))


def samples_of_blend(mm, cache, mapped=True):
    """All samples of a blend of two pairs; None: it is refused."""
    cfg = config(mm, (["in/a", "in/b"], [1, 3]), path_to_cache=cache, mmap_bin_files=mapped)
    try:
        train = quiet(build, mm, [20, 0, 0], cfg)[0]
        return quiet(train.batch, range(len(train)))
    except (ValueError, FileNotFoundError):
        return None


def read_damaged_files(mm, count):
    """Up to two files are damaged, so many times: with the old cache it is as with a new one."""
    limits = importlib.import_module("resource")
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    most = pages * limits.getpagesize() + (2 << 30)  # for forged numbers: none is so large
    limits.setrlimit(limits.RLIMIT_AS, (most, most))
    good = files_of(".")
    names = sorted(good)
    for case in range(count):
        rng = np.random.default_rng([13, case])
        files = dict(good)
        for path in rng.choice(names, rng.integers(3), replace=False):
            files[path] = damaged_bytes(rng, files[path], good[rng.choice(names)])
            if rng.random() < 0.1:
                del files[path]
        put_files(files)
        mapped = bool(rng.integers(2))
        found = samples_of_blend(mm, "cache", mapped)
        wanted = samples_of_blend(mm, "new", mapped)
        assert (found is None) == (wanted is None), case
        if found is not None:
            same_samples(found, wanted, case)
        assert not os.path.exists("ran"), case


@linux
@pytest.mark.parametrize(
    "count", [60, pytest.param(round(1500 * CASES), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_damaged_pairs_and_caches_are_never_seen(mm, tmp_path, monkeypatch, count):
    """The right data or a sentence, never a signal or all the memory."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(5)
    mk(mm, "in/a", random_docs(rng, 12, 9), np.uint16)
    mk(mm, "in/b", random_docs(rng, 9))
    put_files(files_of("."))
    assert samples_of_blend(mm, "cache") is not None
    job = functools.partial(read_damaged_files, mm, count)
    assert in_children(job, timeout=100 + count) == [0]


# ==============================================================================
# README's drawings, commands and scripts
# ==============================================================================


@pytest.fixture(scope="session")
def readme():
    """README's text; the suite may stand without README."""
    path = HERE / "README.md"
    if not path.exists():
        pytest.skip("README.md is not beside this file")
    return path.read_text(encoding="utf-8")


def readme_block(readme, language, words):
    """The block of README in this language that has these words."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if words in block]
    return block


def test_readmes_map_is_that_of_the_module(readme, source):
    """Each section by its name, and about how many lines it has."""
    promised = {}
    for number, name, count in re.findall(r"\| (\d+) ([^|]+) \| (\d+) (?=\|)", readme):
        promised[f"{number}. {name}"] = int(count)
    _, *pieces = re.split(r"^# =+\n# (.+)\n# =+\n", source, flags=re.MULTILINE)
    lines = {}
    for banner, text in zip(pieces[::2], pieces[1::2], strict=True):
        if not banner.startswith("PART"):
            lines[banner] = text.count("\n")
    assert lines.keys() == promised.keys()
    for banner, about in promised.items():
        assert abs(about - lines[banner]) <= 10 + 0.1 * about, (banner, lines[banner])


def test_readmes_shards_merge_to_the_pair_of_one_job(one, readme, tmp_path, monkeypatch):
    """Where Ray runs each job at once; and Slurm's have the names that README merges."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "megatron_min", one)
    os.mkdir("books")
    for name in "ab":
        jsonl(f"books/{name}.jsonl", [name * k for k in range(50)])
    whole = one.preprocess("books/*.jsonl", "whole", append_eod=True)["text"]
    ray = mock.Mock(get=list)
    ray.remote.return_value.return_value.remote = one.preprocess
    monkeypatch.setitem(sys.modules, "ray", ray)
    exec(readme_block(readme, "python", "ray.remote"), {})
    assert bytes_of_pair("books_text_document") == bytes_of_pair(whole)
    parts = "books_text_document_*_of_00016.idx"
    assert len(glob.glob(parts)) == 16 and parts in readme_block(readme, "sh", "srun")


def test_readmes_lines_for_parquet(one, readme, tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "megatron_min", one)
    texts = ["first", "", "third"]
    table = sys.modules["pyarrow"].table({"text": texts, "more": [1, 2, 3]})
    parquet.write_table(table, "corpus.parquet")
    exec(readme_block(readme, "python", "pyarrow.parquet"), {})
    whole = one.preprocess(texts=texts, output_prefix="whole", append_eod=True)["text"]
    assert bytes_of_pair("corpus_text_document") == bytes_of_pair(whole)


def run_training(folder, ranks=1, **layout):
    """What train.py prints, on so many ranks."""
    env = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"} | layout
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = [sys.executable, *launcher, "train.py", "corpus_text_document"]
    done = subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_training_script_has_equal_losses_on_1_2_and_4_ranks(one, readme, tmp_path):
    """It learns; and it goes on where it stopped, on other ranks."""
    sources = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))[:20]
    texts = [path.read_text("utf-8", errors="replace") for path in sources]
    one.preprocess(texts=texts, output_prefix=tmp_path / "corpus", append_eod=True)
    script = readme_block(readme, "python", "python train.py PREFIX")
    (tmp_path / "train.py").write_text(script)
    lines = run_training(tmp_path)
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(losses) == 4 and losses[-1] < losses[0]
    checkpoint = tmp_path / "checkpoint.pt"
    for ranks, layout in ((2, {"TP": "2"}), (4, {}), (4, {"TP": "2", "CP": "2"})):
        checkpoint.unlink()
        assert run_training(tmp_path, ranks, **layout) == lines, layout
    checkpoint.unlink()
    (tmp_path / "train.py").write_text(script.replace("\nsteps = 20\n", "\nsteps = 10\n"))
    first = run_training(tmp_path)
    (tmp_path / "train.py").write_text(script)
    assert first + run_training(tmp_path, 2) == lines
    assert run_training(tmp_path) == []


def test_lines_for_nanogpt_go_on_from_its_step(readme, one, tmp_path):
    """Each step reads its own samples, whatever was read ahead, or to estimate losses."""
    train = data_of_a_run(one, tmp_path)
    names = vars(one) | {"torch": torch, "device": "cpu", "seed_offset": 1, "ddp_world_size": 2}
    names |= {"batch_size": 2, "block_size": 8, "tokens_per_iter": 32}  # 4 samples in a step
    names["builder"] = mock.Mock()
    names["builder"].build.return_value = [train, train, None]
    for iter_num in (0, 3):
        names["iter_num"] = iter_num
        exec(readme_block(readme, "python", "def get_batch(split)"), names)
        for step in range(iter_num, 6):
            wanted = train.batch([4 * step + 2, 4 * step + 3])
            for found, key in zip(names["get_batch"]("train"), ("tokens", "labels"), strict=True):
                same(found, wanted[key])
            with torch.no_grad():
                estimated, _ = names["get_batch"]("train")
            same(estimated, train.batch([4 * (step - iter_num) + k for k in (2, 3)])["tokens"])
