# SPDX-License-Identifier: MIT
"""Tests of megatron_min: one suite, run on the Python kernels and on the C kernels.

    pytest                              C too if _megatron_min is built, upstream too if installed
    MEGATRON_MIN_C=1 pytest             a missing build is a failure; =0: the Python kernels alone
    MEGATRON_MIN_CASES=20 pytest        twenty times the random cases
    MEGATRON_MIN_PARITY=1 pytest        a missing megatron-core is a failure, not a skip
    MEGATRON_MIN_FORK=0 pytest          tests that fork this process are skipped

Oracles are plain loops, numpy's own shuffle, and megatron-core 0.16.1 (extra "parity").  Helpers
take `mm` or `up` (ours or upstream's names in one namespace), so a parity test runs one function
twice.  "Upstream: ..." in a test says what megatron-core does instead.
"""

import array
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
import importlib.util
import inspect
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import pathlib
import pickle
import random
import re
import runpy
import secrets
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
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
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and limits that hold")

torch.set_num_threads(1)
# The processes of the tests warn, and print, as Python does by itself.
os.environ.pop("PYTHONWARNINGS", None)
os.environ.pop("PYTHONUNBUFFERED", None)


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


for _implementation in IMPLEMENTATIONS:
    # A worker process that imports this file then has the classes of what is sent to it.
    with contextlib.suppress(ImportError, pytest.skip.Exception):  # the tests say what is missing
        copy_of_module(_implementation)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts into the background so, and the commands under test would be, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def this_process(request):
    """Nothing waits for the disk; with MEGATRON_MIN_FORK=0 a test that forks is skipped.

    The allocator of gcc 12's address sanitizer, unlike glibc's, does not see to its locks at a
    fork: where another thread holds one at that moment, the new process waits for it for ever.
    """
    # Where workers are started by forkserver, it imports these once, and not each of them.
    multiprocessing.set_forkserver_preload(["torch", __name__])
    if FORK is not None:  # by the time that the first one is started it is done
        multiprocessing.forkserver.ensure_running()
    if any("programs" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("programs")  # it imports torch meanwhile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", do_not_wait)
        if os.environ.get("MEGATRON_MIN_FORK") == "0":
            skip = mock.Mock(side_effect=pytest.skip.Exception("forks"))
            patch.setattr(multiprocessing.context.ForkProcess, "_Popen", skip)
        gc.freeze()  # no gc.collect() looks at what is here by now: it takes 1 ms, not 100
        yield


def do_not_wait(descriptor):
    """In place of os.fsync()."""


@pytest.fixture(scope="session", autouse=True)
def files_in_memory(pytestconfig):
    """Put every tmp_path into memory (100 MB): on a disk, a new file takes ten times as long."""
    place = None  # the usual one
    if pytestconfig.option.markexpr == "not slow" and os.path.isdir("/dev/shm"):
        if shutil.disk_usage("/dev/shm").free > (1 + CASES) * (1 << 30):
            place = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=place) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DEBUG_TEMPROOT", folder)
        yield


@pytest.fixture(params=IMPLEMENTATIONS)
def mm(request):
    """The module, once with each implementation of the kernels."""
    return copy_of_module(request.param)


@pytest.fixture(scope="session")
def one():
    """The module, once, with the Python kernels."""
    return copy_of_module("python")


@pytest.fixture(scope="session")
def up():
    """megatron-core's names in one namespace; skips the test if it is not installed."""
    modules = ["blended_megatron_dataset_builder", "blended_megatron_dataset_config"]
    modules += ["gpt_dataset", "helpers", "indexed_dataset", "utils"]
    names = types.SimpleNamespace()
    # What it would compile for GPUs is not used; to import the compiler takes half the time.
    with warnings.catch_warnings(), mock.patch.object(torch, "compile"):
        warnings.simplefilter("ignore")
        if os.environ.get("MEGATRON_MIN_PARITY") != "1":
            pytest.importorskip("megatron.core", reason="needs pip install megatron-core==0.16.1")
        for module in modules:
            found = importlib.import_module(f"megatron.core.datasets.{module}")
            vars(names).update({k: v for k, v in vars(found).items() if not k.startswith("__")})
        names.calculator = importlib.import_module("megatron.core.num_microbatches_calculator")
        names.rerun = importlib.import_module("megatron.core.rerun_state_machine")
    gc.freeze()  # upstream calls gc.collect() for every file
    return names


@pytest.fixture
def group():
    """A group of one process: upstream cannot cache a blend without one."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
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


class Bare:
    """A dataset that is no MegatronDataset, with a path and a split."""

    dataset_path = "bare"

    def __init__(self, n, split):
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
    if found.dtype == wanted.dtype and np.array_equal(found, wanted):
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
    """Documents of 0 .. longest + 1 tokens; the last one has one."""
    lengths = rng.integers(1, longest + 1, rng.integers(1, most + 1))
    if rng.random() <= empty:
        lengths[:] = 0
    lengths[rng.integers(len(lengths))] += 1
    lengths[rng.random(len(lengths)) <= empty] = 0
    return [rng.integers(0, vocab, n) for n in lengths] + [[1]]


def config(mm, blend=None, **fields):
    """A GPTDatasetConfig with short samples, no mask, and the whole of a corpus for training."""
    flags = ["create_attention_mask", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"]
    defaults = {"random_seed": 1234, "sequence_length": 8, "tokenizer": Tok()}
    defaults |= dict.fromkeys(flags, False)
    if blend is not None:
        defaults |= {"blend": blend, "split": "1,0,0"}
    return mm.GPTDatasetConfig(**defaults | fields)


def gpt(mm, prefix, n=None, split="train", documents=None, cls=None, **fields):
    """A GPTDataset of n samples over all (or the given) documents of a prefix."""
    cls = cls or mm.GPTDataset
    cfg = config(mm, ([prefix], None), **fields)
    ds = cls.build_low_level_dataset(prefix, cfg)
    documents = np.arange(len(ds), dtype=np.int32) if documents is None else documents
    return cls(ds, prefix, documents, n, mm.Split[split], cfg)


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


def files_of(folder):
    """{name: bytes} of a folder and those below it."""
    files = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def bytes_of_pair(prefix):
    """The contents of .bin and .idx."""
    return [pathlib.Path(f"{prefix}.{kind}").read_bytes() for kind in ("bin", "idx")]


def patch(path, offset, data):
    """Overwrite some bytes of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def quiet(function, *args, **kwargs):
    """Call, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def raises(kind, words, function, /, *arguments, **options):
    """Check that a call raises an error of this kind, with these words (a regular expression)."""
    with pytest.raises(kind, match=words):
        function(*arguments, **options)


def command(mm, capsys, *argv):
    """Run a command in this process -> (exit code, stdout, stderr)."""
    try:
        code = mm.main([str(argument) for argument in argv])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def in_child(job, timeout=600):
    """Run a function in a process of its own -> its exit code, 0 if it returned; None: it hangs."""
    process = FORK.Process(target=job)
    quiet(process.start)
    process.join(timeout)
    code = process.exitcode
    process.kill()
    return code


def jsonl(path, texts, key="text"):
    """Write texts as JSON lines -> the path."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({key: text}) + "\n" for text in texts)
    return str(path)


@pytest.fixture
def toy(mm, tmp_path):
    """The corpus of every example: aaaa bbb cccccc."""
    return mk(mm, tmp_path / "toy", [[97] * 4, [98] * 3, [99] * 6])


# ==============================================================================
# The module itself
# ==============================================================================


def test_contents_match_banners(one):
    """The docstring lists the parts, the sections and their questions, which open the sections."""
    source = inspect.getsource(one)
    promised = re.findall(r"^ *(Part [IV]+, .+|\d+\. .+?)(?:  +(.+\?))?$", one.__doc__, re.M)
    banners = re.findall(r"^# =+\n# (PART [IV]+: .+|\d+\. .+)\n# =+\n(.*)$", source, re.M)
    for (entry, question), (title, line) in zip(promised, banners, strict=True):
        assert re.findall(r"\w+", entry.upper()) == re.findall(r"\w+", title.upper())
        if not title.startswith("PART"):
            assert line == f"# Question: {question}", title
    assert len(banners) == 4 + 23


def test_c_is_the_default_where_it_is_built(one, c, monkeypatch):
    monkeypatch.delenv("MEGATRON_MIN_C", raising=False)
    default = runpy.run_path(str(HERE / "megatron_min.py"))
    assert [default["IMPLEMENTATION"], c.IMPLEMENTATION, one.IMPLEMENTATION] == ["c", "c", "python"]


def test_doctests_of_the_module(one):
    result = doctest.testmod(one)
    assert (result.failed, result.attempted > 40) == (0, True)


def test_doctests_of_the_readme(one, readme, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron_min", one)
    result = doctest.testfile(str(HERE / "README.md"), module_relative=False)
    assert (result.failed, result.attempted > 0) == (0, True)


# ==============================================================================
# 1. The file pair
# ==============================================================================

PAIR = [[1] * 3, [2] * 2, [], [3] * 4]  # the documents of the fixture pair


@pytest.fixture
def pair(one, tmp_path):
    """The prefix of a corpus of four documents, int32, of which one is empty."""
    return mk(one, tmp_path / "pair", PAIR)


def idx_bytes(lengths, documents, code=4, size=4, modes=()):
    """The .idx that the format's table asks for, by struct alone."""
    pointers = [size * end for end in itertools.accumulate([0, *lengths])][:-1]
    return (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *pointers)
        + struct.pack(f"<{len(documents)}q", *documents)
        + struct.pack(f"<{len(modes)}b", *modes)
    )


# -- Reading -----------------------------------------------------------------------------------

# the dtypes of the format's codes 1, 2, ...
DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16]


@pytest.mark.parametrize("code, dtype", list(enumerate(DTYPES, 1)))
@pytest.mark.parametrize("docs", [PAIR, [], [[], []]], ids=str)
def test_sequences_are_read_as_from_a_list(one, tmp_path, docs, code, dtype):
    """Views are read-only, keep their data if the pair is rewritten, and do not pin the dataset."""
    size = np.dtype(dtype).itemsize
    for key in (code, np.uint8(code), np.array(code), torch.tensor(code), dtype, np.dtype(dtype)):
        assert one.DType.size(key) == size  # the number's own type may have another size
    assert one.DType.dtype_from_code(np.int64(code)) == dtype
    n = len(docs)
    lengths = [len(doc) for doc in docs]
    for mmap in (True, False):
        prefix = mk(one, tmp_path / "p", docs, dtype)
        assert bytes_of_pair(prefix)[1] == idx_bytes(lengths, range(n + 1), code, size)
        ds = one.IndexedDataset(prefix, mmap=mmap)
        assert (ds.dtype, len(ds), lists(ds), ds.index) == (dtype, n, docs, ds)
        for i in (n, -n - 1, 2**70):
            raises(IndexError, f"index {i} is .*: .* {n} sequences of .*/p$", ds.__getitem__, i)
        for start, stop in itertools.product([None, *range(-5, 6)], repeat=2):
            assert lists(ds[start:stop]) == docs[start:stop]
        raises(ValueError, "step 2", ds.__getitem__, slice(None, None, 2))
        places = itertools.product(range(-n, n), range(-2, 6), [None, *range(-1, 6)])
        for i, offset, length in places:
            end = lengths[i] if length is None else offset + length
            if 0 <= offset <= end <= lengths[i]:
                same(ds.get(i, offset, length), np.array(docs[i][offset:end], dtype))
            else:
                raises(IndexError, f"/p: .*sequence {i % n} has", ds.get, i, offset, length)
        views = [*ds, *ds[:], ds.sequence_lengths]
        if mmap and any(lengths):
            views += [ds.mapped_tokens, ds.get(0)]
            assert not any(tokens.flags.writeable for tokens in views)
        wanted = lists(views)
        mk(one, prefix, [[7] * 3, [8] * 4], dtype)
        assert lists(ds) == docs
        dropped = weakref.ref(ds)
        del ds
        gc.collect()
        assert dropped() is None
        assert lists(views) == wanted


def read_3_bytes(descriptor, size, place, pread=os.pread):
    """In place of os.pread()."""
    return pread(descriptor, min(size, 3), place)


def test_a_bin_of_a_wrong_size(one, pair, monkeypatch):
    """A read returns tokens or raises; a short read by the system is not the end of the file."""
    monkeypatch.setattr(os, "pread", read_3_bytes)
    monkeypatch.setattr(time, "sleep", None)  # upstream: tries again for 70 s
    ds = one.IndexedDataset(pair, mmap=False)
    assert lists(ds) == PAIR
    for size in (40, 32, 0, 35):  # too long; too short; within a token
        os.truncate(f"{pair}.bin", size)
        raises(one.DatasetFormatError, r"pair\.bin: file size", one.IndexedDataset, pair)
    raises(one.DatasetFormatError, r"pair\.bin .* at offset 20: .*open it again", ds.get, 3)
    broken = mock.Mock(side_effect=OSError(errno.EIO, "broken"))  # it names no file
    monkeypatch.setattr(os, "pread", broken)
    monkeypatch.setattr(one, "open", broken, raising=False)
    for kind, function, argument in (("bin", ds.get, 3), ("idx", one.IndexedDataset, pair)):
        raises(OSError, rf"cannot be read: broken: .*pair\.{kind}'", function, argument)


@pytest.mark.slow
@linux
def test_a_pair_of_more_than_2_32_tokens(mm, tmp_path):
    """What lies far behind is found, by get() and in samples.  The .bin takes no room on disk."""
    most = 2**31 - 1  # the longest sequence
    (tmp_path / "p.idx").write_bytes(idx_bytes([most, most, 5], range(4), 1, 1))
    (tmp_path / "p.bin").touch()
    os.truncate(tmp_path / "p.bin", 2 * most + 5)
    patch(tmp_path / "p.bin", 2 * most - 1, bytes([4, 5, 0, 0, 0, 6]))
    train = gpt(mm, str(tmp_path / "p"), sequence_length=2**20)
    assert lists([train.dataset.get(1, most - 2, 2), train.dataset[2]]) == [[0, 4], [5, 0, 0, 0, 6]]
    assert len(train) == 2**12
    for k in range(0, len(train), 100):
        i, offset, _ = train.pieces(k)[0]
        patch(tmp_path / "p.bin", i * most + offset, b"\7")
        assert train[k]["tokens"][0] == 7


# -- Is a pair what its format says? -----------------------------------------------------------


@pytest.mark.parametrize("modes", [(), (1, -2, 0, 7)], ids=["mapped", "moded"])
def test_a_damaged_index_is_refused_or_read_in_bounds(one, tmp_path, modes):
    """What opens gives what is in the .bin at the place that it names, or an error."""
    tokens = bytes(range(36))
    (tmp_path / "p.bin").write_bytes(tokens)
    whole = idx_bytes([3, 2, 0, 4], [0, 1, 3, 3, 4], modes=modes)
    damages = [whole + whole[-1:], whole[:-1], whole[:34], whole[:33], b"", idx_bytes([], [])]
    damages.append(idx_bytes([5, 2], [0, 1, 2], code=5))  # 36 bytes of int64
    forged = [-(2**63), -1, 0, 1, 2**31, 2**63 - 1]
    pieces = [b"\x01", b"\x04", b"\x09", b"\x80", *[struct.pack("<q", i) for i in forged]]
    for at, piece in itertools.product([17, *range(0, len(whole), 2)], pieces):
        damages.append((whole[:at] + piece + whole[at + len(piece) :])[: len(whole)])
    opened = 0
    for damaged in damages:
        (tmp_path / "p.idx").write_bytes(damaged)
        try:
            ds = one.IndexedDataset(tmp_path / "p", multimodal=bool(modes), mmap=not modes)
        except one.DatasetFormatError as error:
            assert re.search(r"/p\.(idx|bin): .+: expected .+, got .+", str(error), re.DOTALL)
            assert damaged != whole
            continue
        opened += 1
        assert damaged[:17] == whole[:17], "magic and version"
        assert ds.document_indices[[0, -1]].tolist() == [0, len(ds)]
        size = one.DType.size(ds.dtype)
        for i, begin in enumerate(ds.sequence_pointers.tolist()):
            count = int(ds.sequence_lengths[i])
            end = begin + size * count
            if 0 <= begin <= end <= 36 and begin % size == 0:
                [found] = ds.get_many([(i, 0, count)])
                assert found.tobytes() == tokens[begin:end]
            else:
                raises(one.DatasetFormatError, rf"p\.idx: sequence {i}:", ds.get, i)
    assert opened > 100


def test_the_whole_check_sees_each_entry_of_a_long_index(one, tmp_path):
    """It is looked at in parts of 2**15.  All sequences are empty; documents go on behind them."""
    n = 40_000
    whole = idx_bytes([0] * n, [*range(n), *[n] * n])
    (tmp_path / "p.bin").touch()
    for name, begin, kind, first, last, wrong in (
        ("sequence_lengths", 34, "<i", 0, n - 2, [-1, -1, -1, -1]),
        ("sequence_pointers", 34 + 4 * n, "<q", 0, n - 2, [4, 4, 4, 4]),
        ("document_indices", 34 + 12 * n, "<q", 1, 2 * n - 2, [-1, 2**15 - 3, 2**15 - 2, n - 1]),
    ):
        for place, value in zip((first, 2**15 - 1, 2**15, last), wrong, strict=True):
            (tmp_path / "p.idx").write_bytes(whole)
            entry = struct.pack(kind, value)
            patch(tmp_path / "p.idx", begin + len(entry) * place, entry)
            with pytest.raises(one.DatasetFormatError, match=rf"p\.idx: {name}\[{place}\]: "):
                one.IndexedDataset(tmp_path / "p", check=True)


def test_a_missing_pair_and_those_of_similar_names(one, tmp_path, monkeypatch):
    """The first few of hundreds are named, also if the name has wildcards or an ending."""
    monkeypatch.chdir(tmp_path)
    names = [f"w[1]_{number:03}_document" for number in range(300)]
    for name in [*reversed(names), "w1_x"]:
        for ending in (".idx", ".bin"):
            pathlib.Path(name + ending).touch()
    for path in ("w[1]_none.idx", "w[1].bin"):  # no pairs
        pathlib.Path(path).touch()
    jsonl("w.jsonl", ["a"])
    os.mkdir("other")
    jsonl("other/w", ["a"])
    mk(one, tmp_path / "x_too", [])
    shutil.copyfile("x_too.idx", "x.idx")
    for prefix, missing, words in (
        ("w[1]", "w[1].idx", f"{', '.join(names[:5])} and 295 more:"),
        (names[7][:-1], f"{names[7][:-1]}.idx", f"holds {names[7]}:"),
        (f"{names[7]}.bin", f"{names[7]}.bin.idx", f"holds {names[7]}:"),
        ("", ".idx", f"holds w1_x, {', '.join(names[:4])} and 297 more:"),
        ("none/w", "none/w.idx", "directory:"),
        ("v[1]_007", "v[1]_007.idx", f"holds {names[7]}, w"),
        ("v[1]_007", "v[1]_007.idx", "_document and 299 more:"),
        ("w.jsonl", "w.jsonl.idx", "preprocess makes; the folder holds w"),
        ("other/w", "other/w.idx", "w is not a pair; give the prefix of a pair, which megatron-"),
        ("x", "x.bin", "holds x_too:"),
    ):
        assert not one.IndexedDataset.exists(prefix)
        with pytest.raises(FileNotFoundError, match=re.escape(words)) as caught:
            gpt(one, prefix)
        assert caught.value.errno == errno.ENOENT
        assert caught.value.filename == str(tmp_path / missing)


def test_a_path_means_what_the_system_says(one, tmp_path, monkeypatch):
    """link/.. is above the folder that link names, and "above/" is the pair above/.bin."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("above/folder")
    os.symlink("above/folder", "link")
    (tmp_path / "above" / "rows").write_text(json.dumps({"messages": ROW}))
    for prefix, place, other in (("link/../p", "above/p", "p"), ("above/", "above/./", "above")):
        mk(one, f"./{other}", [[7] * 9] * 3)
        for path in (prefix, f"{tmp_path}/{prefix}"):
            assert not one.IndexedDataset.exists(path)
            raises(FileNotFoundError, None, one.IndexedDataset, path)
            mk(one, path, [[1] * 9] * 3)
            train = gpt(one, path)
            assert train[0]["tokens"][0] == 1
            wanted = one.find(train, path, 0)
            real = os.path.realpath(f"{place}.bin").removesuffix(".bin")
            for name in (prefix, place, f"{tmp_path}/{prefix}", real):
                assert one.find(train, name, 0) == wanted != []
            words = f"^path_prefix: .* pair of the dataset .*, got {other}$"
            raises(ValueError, words, one.find, train, other, 0)
            for kind in ("bin", "idx"):
                os.unlink(f"{place}.{kind}")
        assert len(os.listdir(f"{place}/cache/GPTDataset_indices")) == 10
    gpt(one, "above", path_to_cache="link/../caches/")
    assert len(os.listdir("above/caches")) == 5
    assert len(chat(one, "link/../rows")) == 1
    folder = one.ObjectStorageConfig("link/../idx").path_to_idx_cache
    assert (os.path.realpath(folder), folder[0]) == (f"{tmp_path}/above/idx", "/")


def test_paths_may_be_bytes(one, hf, tmp_path):
    """No file is named b'...'.  Bytes that are no UTF-8 are a path, too."""
    folder = os.fsencode(tmp_path)
    assert (one.get_idx_path(b"p"), one.get_bin_path(b"p")) == ("p.idx", "p.bin")
    lines = os.fsencode(jsonl(tmp_path / "lines", ["a", "b"]))
    one.encode_jsonl(lines, folder + b"/\xff")
    made = one.preprocess(lines, folder + b"/p", one.build_tokenizer(os.fsencode(hf)))
    assert made == {"text": f"{tmp_path}/p_text_document"}
    one.merge(folder + b"/\xff", folder + b"/m")
    one.merge([folder + b"/\xff", folder + b"/m"], folder + b"/n")
    assert one.IndexedDataset.exists(folder + b"/n")
    assert lists(one.IndexedDataset(folder + b"/n")) == [[97], [98]] * 2
    with one.IndexedDatasetBuilder(folder + b"/o.bin") as builder:
        builder.add_index(os.fsencode(mk(one, tmp_path / "q", [[1] * 30])))
        builder.finalize(folder + b"/o.idx")
    blend = one.get_blend_from_list([folder + b"/o"])
    assert blend == ([f"{tmp_path}/o"], None)
    for paths in (blend, ([folder + b"/o"], None)):
        train = build(one, [5, 0, 0], config(one, paths, path_to_cache=folder + b"/cache"))[0]
        assert train.unique_identifiers["dataset_path"] == f"{tmp_path}/o"
        assert one.find(train, folder + b"/o", 0) == one.find(train, f"{tmp_path}/o", 0) != []
    (tmp_path / "rows").write_text(json.dumps({"messages": ROW}))
    assert len(gpt(one, folder + b"/rows", cls=one.SFTDataset)) == 1
    assert one.toy_corpus(folder) == f"{tmp_path}/toy"
    assert one.ObjectStorageConfig(folder).path_to_idx_cache == str(tmp_path)
    raises(ValueError, "prefixes of type bytes", config, one, (folder + b"/o", None))
    assert not any("b'" in name for name in files_of(tmp_path))


@pytest.mark.parametrize("moment, changed", [("idx", "idx"), ("bin", "idx"), ("bin", "bin")])
def test_a_pair_that_changes_while_it_is_opened_is_refused(one, pair, monkeypatch, moment, changed):
    """No old .idx is used with a new .bin, nor one that is cut before it is mapped."""

    def size_of_changed(path):
        if path.endswith(moment):
            os.utime(f"{pair}.{changed}", (1, 1))
        return os.stat(path).st_size

    monkeypatch.setattr(os.path, "getsize", size_of_changed)
    raises(one.DatasetFormatError, rf"pair\.{changed}: .* was opened", one.IndexedDataset, pair)


def test_a_fingerprint_is_of_the_data_alone(one, tmp_path, monkeypatch):
    """It is equal for copies and after a touch; while the times are equal, nothing is read."""
    docs = [[1] * 10] * 2000
    prefix = mk(one, tmp_path / "p", docs)
    first = one.IndexedDataset(prefix).fingerprint()
    assert {type(value) for value in first.values()} == {int}
    content = pathlib.Path(f"{prefix}.bin").read_bytes()
    assert first["bin_ends_crc32"] == zlib.crc32(content[:4096] + content[-4096:])
    shutil.copytree(tmp_path, tmp_path / "copy")
    crc32 = mock.Mock(wraps=zlib.crc32)
    monkeypatch.setattr(one.zlib, "crc32", crc32)
    for touched in ([], ["idx"], ["bin"]):
        note = one._identity_of_pair(one.IndexedDataset(prefix))
        for kind in touched:
            os.utime(f"{prefix}.{kind}", (2**31, 2**31))
        crc32.reset_mock()
        one._check_identity(one.IndexedDataset(prefix), note, "")
        assert crc32.call_count == 2 * len(touched)
    for place, mmap in ((prefix, True), (prefix, False), (tmp_path / "copy" / "p", True)):
        assert one.IndexedDataset(place, mmap=mmap).fingerprint() == first
    others = [docs[:-1], [*docs[:900], [1] * 9, [1] * 11, *docs[902:]], [], [[]], [[1]], [[1, 2]]]
    for other in (*others, [[2] * 10, *docs[1:]], [*docs[:-1], [2] * 10]):
        assert one.IndexedDataset(mk(one, tmp_path / "q", other)).fingerprint() != first


class Shifted(copy_of_module("python").IndexedDataset):
    """A user's pair, whose get() uses an attribute, and whose constructor has other arguments."""

    def __init__(self, shift, *arguments, **options):
        super().__init__(*arguments, **options)
        self.shift = shift

    def get(self, *arguments):
        return super().get(*arguments) + self.shift


def test_a_pickle_is_all_but_the_files(one, pair, monkeypatch):
    """Who unpickles it opens the same pair, or has an error.  Upstream: whatever is there then."""
    settings = one.ObjectStorageConfig(bin_chunk_nbytes=100)
    monkeypatch.chdir(os.path.dirname(pair))
    ds = Shifted(10, "pair", mmap=False, object_storage_config=settings, check=True)
    ds.document_indices = np.array([7])
    pickled = pickle.dumps(ds)
    assert not {"_tokens", "_stamps", "_memo"} & set(ds.__getstate__())
    assert len(pickled) < 1100
    monkeypatch.chdir("/")
    again = pickle.loads(pickled)
    for name in ("path_prefix", "mmap", "check", "object_storage_config", "shift"):
        assert getattr(again, name) == getattr(ds, name)
    assert again.document_indices.tolist() == [7]  # one that was set
    assert lists(again) == [[token + 10 for token in doc] for doc in PAIR]
    patch(f"{pair}.bin", 0, b"\7")  # the .idx stays
    raises(one.DatasetFormatError, "was replaced .*build .*bin_ends_crc32", pickle.loads, pickled)


# -- The builder -------------------------------------------------------------------------------


def test_a_pair_is_made_in_many_ways_once(one, pair, tmp_path):
    """A document continues until it is ended; what is refused is not written."""
    prefix = tmp_path / "m"
    with one.IndexedDatasetBuilder(f"{prefix}.bin", np.int16, multimodal=True) as builder:
        builder.add_document([1, 2, 3], (1, 2), [1, -2])
        builder.add_document(np.array([4, 5]), b"\2")  # bytes are numbers, too
        builder.add_item(torch.tensor([[6], [7]]), mode=3)  # flattened
        builder.add_item(np.array([], np.float64))
        for method, arguments, word in (
            ("add_item", [np.array([1.5])], "[1.5]"),
            ("add_document", [[1, 2, 3], [2]], "3 tokens"),
            ("add_document", [[1], [-1, 2]], "-1"),
            ("add_sequences", [range(2**33), [2**31]], f"int32, got [{2**31}]"),  # as many bytes
            ("add_document", [[1, 2], [1, 1], [0]], "2 lengths, but 1 modes"),
            ("add_document", [[1], [1], [128]], "int8, got [128]"),
            ("finalize", [f"{prefix}.idx"], "end_document"),
        ):
            raises(ValueError, re.escape(word), getattr(builder, method), *arguments)
        builder.end_document()
        builder.end_document()
        builder.add_document(["8", "09"], [2], [4])  # as upstream's own tests have them
        assert not one.IndexedDataset.exists(prefix)
        raises(FileExistsError, r"/m\.bin", builder.finalize, f"{prefix}.bin")
        builder.finalize(f"{prefix}.idx")
        raises(ValueError, r"/m\.bin: closed .* a new builder", builder.finalize, f"{prefix}.idx")
    modes = [1, -2, 0, 3, 0, 4]
    wanted = idx_bytes([1, 2, 2, 2, 0, 2], [0, 2, 3, 5, 5, 6], code=3, size=2, modes=modes)
    assert bytes_of_pair(prefix) == [np.arange(1, 10, dtype="<i2").tobytes(), wanted]
    ds = one.IndexedDataset(prefix, multimodal=True)
    tokens, mode = ds.get(-1, 1)
    assert (tokens.tolist(), mode) == ([9], 4)
    sequences, some_modes = ds[1:3]
    assert (lists(sequences), some_modes.tolist()) == ([[2, 3], [4, 5]], [-2, 0])
    assert lists(one.IndexedDataset(prefix)[:2]) == [[1], [2, 3]]  # tokens alone
    raises(one.DatasetFormatError, "modes", one.IndexedDataset, pair, multimodal=True)


def test_ids_at_the_edges_of_a_dtype(one):
    """Ids in lists and arrays fit, or are refused.  Upstream wraps and writes them."""
    for dtype in INTEGERS:
        limits = np.iinfo(dtype)
        edges = [limits.min, 0, limits.max, 0]
        wanted = b"".join(i.to_bytes(limits.bits // 8, "little", signed=i < 0) for i in edges)
        for ids in (edges, [0, limits.max + 1], [limits.min - 1, 0]):
            forms = [ids, [str(i) for i in ids]]
            for source in (*INTEGERS, np.uint32, np.uint64):
                if np.iinfo(source).min <= min(ids) and max(ids) <= np.iinfo(source).max:
                    values = np.array(ids, source)
                    forms += [values, np.repeat(values, 2)[::2], torch.from_numpy(values)]
                    forms += [values.astype(values.dtype.newbyteorder())]
            for values in forms:
                if ids is edges:
                    assert one._encode_tokens(values, np.dtype(dtype)) == wanted
                else:
                    with pytest.raises(ValueError, match=re.escape(str(ids[0] or ids[1]))):
                        one._encode_tokens(values, np.dtype(dtype))
    # a vocabulary below 65,500 is stored in two bytes
    kinds = [one.DType.optimal_dtype(size) for size in (65499, 65500, None)]
    assert kinds == [np.uint16, np.int32, np.int32]


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


@linux
def test_a_builder_that_met_a_full_disk_stays_closed(one, tmp_path, monkeypatch):
    """Even if there is room again and the error was caught.  The working directory changes."""
    names = r"cannot be written: File too large: '.*/p(\.bin)?\.[0-9a-f]{16}\.tmp'"
    monkeypatch.chdir(tmp_path)
    builder = one.IndexedDatasetBuilder("p.bin", np.uint8)
    monkeypatch.chdir("/")
    with pytest.raises(ValueError, match="closed"), builder:
        builder.add_document([1], [1])
        with pytest.raises(OSError, match=names), files_of_64_kib():
            builder.add_document(np.ones(3 << 20, np.uint8), [3 << 20])
        raises(ValueError, "closed", builder.add_item, [2])
    for synced in (True, False):  # at the end
        with pytest.raises(OSError, match=names), files_of_64_kib():
            with one._NewFile(tmp_path / "p", synced) as file:
                file.write(bytes(1 << 17))
    assert os.listdir(tmp_path) == []


class Interrupted(array.array):
    """Numbers that cannot get more: Ctrl-C comes."""

    def extend(self, numbers):
        raise KeyboardInterrupt

    frombytes = extend


@pytest.mark.parametrize("attribute", ["sequence_lengths", "document_indices", "sequence_modes"])
def test_a_builder_that_is_interrupted_is_closed(one, tmp_path, monkeypatch, attribute):
    """Its tokens are there, and their lengths are not.  What is refused before leaves it open."""
    monkeypatch.chdir(tmp_path)
    with one.IndexedDatasetBuilder("pair.bin", multimodal=True) as builder:
        builder.add_document([1, 2, 3], [2, 1])
    mk(one, tmp_path / "other", [[1]], np.uint8)
    calls = {"add_index": ["pair"], "add_document": [[5, 6], [1, 1]]}
    for name in calls if attribute != "document_indices" else ["add_index"]:
        builder = one.IndexedDatasetBuilder("o.bin", multimodal=True)
        raises(ValueError, "other", builder.add_index, "other")
        builder.add_index("pair")
        numbers = getattr(builder, attribute)
        setattr(builder, attribute, Interrupted(numbers.typecode, numbers))
        raises(KeyboardInterrupt, None, getattr(builder, name), *calls[name])
        setattr(builder, attribute, numbers)
        for again, *words in (("add_item", [1]), ("add_index", "pair"), ("finalize", "o.idx")):
            raises(ValueError, "closed", getattr(builder, again), *words)
        assert not any(file.startswith("o.") for file in os.listdir())


def test_pairs_are_merged_or_refused(one, pair, tmp_path):
    """What is refused changes nothing.  Upstream destroys an input that is also the output."""
    tokens = np.resize(np.arange(251, dtype=np.uint8), 17 << 20)
    large = mk(one, tmp_path / "large", [[], tokens], np.uint8)
    one.merge([mk(one, tmp_path / "none", [], np.uint8), large], tmp_path / "o")
    assert bytes_of_pair(tmp_path / "o") == bytes_of_pair(large)
    os.symlink(f"{pair}.bin", tmp_path / "link.bin")
    damaged = mk(one, tmp_path / "damaged", [[1], [2]])
    patch(f"{damaged}.idx", 42, b"\4")  # the first pointer
    with one.IndexedDatasetBuilder(tmp_path / "modes.bin", multimodal=True) as builder:
        builder.add_document([1, 2], [1, 1], [0, 1])
    before = stamps(tmp_path)
    for inputs, output, word in (
        ([pair], "link", "output"),
        ([pair, large], "out", "uint8"),
        ([pair, tmp_path / "modes"], "out", r"modes\.bin .*multimodal"),
        ([pair, damaged], "out", "sequence_pointers"),
    ):
        raises(ValueError, word, one.merge, inputs, tmp_path / output)
        assert stamps(tmp_path) == before


# ==============================================================================
# 2. Text to tokens
# ==============================================================================


def texts_of(mm, prefix):
    """The documents of a pair as lists of ids, empty ones too."""
    ds = mm.IndexedDataset(prefix, check=True)
    bounds = itertools.pairwise(ds.document_indices.tolist())
    return [list(itertools.chain(*lists(ds[first:end]))) for first, end in bounds]


def test_bytes_are_tokens(one):
    tokenizer = one.ByteTokenizer()
    text = "aé\n€"
    ids = [97, 195, 169, 10, 226, 130, 172]
    assert tokenizer.tokenize(text) == ids
    assert lists(tokenizer.tokenize_batch(["", text])) == [[], ids]
    assert tokenizer.detokenize([*ids, 256]) == text, "eod is no text"
    assert tokenizer.detokenize([97, 195]) == "a\N{REPLACEMENT CHARACTER}", "half of é is none"


LINES_OF_TEXT = (
    b'\n{"text": "1 2", "other": 3}\n'
    b' \t\r\n{"text": "4"}\r\n'  # line ends of Windows
    b'{"text":\r"5"}\n\n'  # a return within a line
    b'{"text": ""}\n'
    b'{"text": " "}\n'  # a text, but no token
    b'{"text": ["1", "", "2 3", " "]}\n'
    b'{"text": ["", " "]}\n'
    b'{"text": "0"}'  # no newline at the end
)


def test_a_line_becomes_a_document(one, tmp_path):
    """It has one sequence, or one for each sentence of a list; preprocess() writes the same."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES_OF_TEXT)
    one.encode_jsonl(path, tmp_path / "plain", Tok(), append_eod=True)
    ds = one.IndexedDataset(tmp_path / "plain")
    assert lists(ds) == [[1, 2, 0], [4, 0], [5, 0], [1], [2, 3, 0], [0, 0]]  # 0 is the eod
    assert ds.document_indices.tolist() == [0, 1, 2, 3, 3, 3, 5, 5, 6]
    made = quiet(one.preprocess, path, tmp_path / "fast", Tok(), append_eod=True)
    assert bytes_of_pair(made["text"]) == bytes_of_pair(tmp_path / "plain")
    of_key = jsonl(tmp_path / "b.jsonl", ["1 2", "70000"], key="other")
    one.encode_jsonl(of_key, tmp_path / "other", Tok(vocab_size=70001), json_key="other")
    assert texts_of(one, tmp_path / "other") == [[1, 2], [70000]]
    path.write_text('{"text": "1"}', "utf-16")
    number = jsonl(tmp_path / "c.jsonl", [["1", 5]])
    for bad, error in ((of_key, KeyError), (path, UnicodeDecodeError), (number, ValueError)):
        raises(error, None, one.encode_jsonl, bad, tmp_path / "none", Tok())
    assert not list(tmp_path.glob("none*"))


# ==============================================================================
# 3. Split, blend, config
# ==============================================================================


def test_weights_are_divided_by_numpys_sum(one):
    """numpy adds in groups, so the last bit may differ from a plain loop's."""
    for rng in cases(100):
        weights = rng.random(rng.integers(1, 300)) * 100
        assert one.normalize(weights.tolist()) == (weights / np.sum(weights)).tolist()
        shares = np.where(rng.random(len(weights)) < 0.5, weights, 0).tolist()[:40] + [1.0]
        used = [share for share in shares if share]
        blend = blended(one, [99] * len(shares), None, None, [(9, shares)] * 2)
        for _, found in blend.phases:  # zeros in between do not group the others otherwise
            assert [share for share in found if share] == one.normalize(used)


def test_a_split_is_read_and_cut_by_hand(one):
    """Text to shares, shares to fractions, fractions to documents."""
    read = one.parse_and_normalize_split
    for text, shares in (
        ("0,0,5.", [0.0, 0.0, 1.0]),
        ("1e3,3E+3", [0.25, 0.75, 0.0]),  # upstream: e ends a number, so these are four
        (" [80/ 10;10] ", [0.8, 0.1, 0.1]),
    ):
        assert read(text) == shares, text
    # upstream drops signs and empty fields, and takes what is left
    for text in ("99,-1,0", "98,,2", "0,0,0", "1,2,3,4", "nan,1,0", "1e999,1"):
        raises(ValueError, f"split '{text}'", read, text)
    matrix = one.convert_split_vector_to_split_matrix
    assert matrix([0, 0.25, 0.75]) == [None, (0, 0.25), (0.25, 1.0)]
    raises(ValueError, "vector_b", matrix, [0.5, 0.5, 0], [0.25, 0.75, 0])
    assert one.split_range((0.5, 1.0), 7) == (4, 7)  # Python rounds 3.5 to the even 4
    assert one.split_range((0, 1.0), torch.tensor(2**30 + 1)) == (0, 2**30 + 1)


PER_SPLIT = [(["q"], None), None, None]
WITHOUT_BLEND = {"blend": None, "split": None}
PHASES = [(4, [1])]


BAD_CONFIGS = [  # what is changed in a good config, a word of the sentence
    ({"sequence_length": 0}, "sequence_length"),
    ({"sequence_length": 8.5}, "sequence_length: .*8.5"),
    ({"random_seed": torch.tensor(4.7)}, "random_seed: .*4.7"),
    ({"random_seed": 2**32}, "random_seed"),
    ({"split": None}, "needs a split"),
    ({"blend": ([], None)}, "blend: expected .* no prefix"),
    ({"blend_phases": [4, [1]]}, "phase 0: expected .* got 4"),
    ({"blend_phases": 5}, "phases: .*got 5"),
    ({"blend_phases": [(4, [1, 1])]}, r"phase 0: weights: .* length 1, got \[1, 1\]"),
    ({"blend": ("p", None)}, "blend: expected .* type str"),
    ({"blend": (np.array(["s3://KEY:SECRET@bucket/c"]), None)}, "blend: .* type ndarray"),
    ({"blend": (["p"], [-2])}, "weight of p"),
    ({"blend_per_split": PER_SPLIT, "blend": None}, "blend_per_split"),
    (WITHOUT_BLEND | {"blend_per_split": PER_SPLIT[:2]}, "blend_per_split"),
    ({"multiple_validation_sets": True}, "blend_per_split"),
    (WITHOUT_BLEND | {"blend_phases": PHASES, "blend_per_split": PER_SPLIT[::-1]}, "blend_phases"),
    ({"tokenizer": "bytes"}, r"tokenizer: .* got a str; pass build_tokenizer\("),
    ({"tokenizer": pathlib.Path("tokenizer.json")}, r"Path; pass build_tokenizer\("),
    ({"tokenizer": object()}, "tokenizer: object needs an attribute unique_identifiers .a dict"),
    ({"tokenizer": Tok}, "tokenizer: expected an object, .*Tok'>"),
    ({"tokenizer": Tok(eod="</s>"), "eod_mask_loss": True}, "Tok needs an attribute eod"),
    ({"tokenizer": Tok(eod=None), "reset_position_ids": True}, "Tok needs an attribute eod"),
    ({"hybrid_context_parallel": True}, "hybrid_context_parallel"),
    ({"reset_attention_mask": True}, "reset_attention_mask"),  # upstream: no effect, no word
]


def test_a_bad_config_is_a_sentence(one):
    for fields, word in BAD_CONFIGS:
        raises(ValueError, word, config, one, **{"blend": (["p"], None), "split": "1"} | fields)


def test_a_config_derives_its_other_fields(one):
    forced = config(one, random_seed=0, split="8,1,1")  # mock data have equal splits
    assert (forced.mock, forced.split, forced.token_dtype_code) == (True, "1,1,1", None)
    per_split = config(one, blend_per_split=PER_SPLIT, tokenizer=Tok(eod=None))  # it is not used
    assert (per_split.mock, per_split.split, per_split.split_matrix) == (False, None, None)
    assert config(one, (["p"], None), blend_per_split=[None] * 3).blend_per_split is None


def test_sequences_numbers_and_paths_of_any_kind(one, tmp_path):
    """OmegaConf's ListConfig is no list.  What JSON lacks must not get into descriptions."""
    items = collections.UserList
    path = pathlib.Path(mk(one, tmp_path / "p", [[1] * 20] * 9))
    p = str(path)
    mix = items([items([p, p]), items([1, 2])])
    phases = items([items([4, items([1, 2])]), items([4, np.array([2, 1])])])
    wanted = config(one, ([p, p], [1, 2]), blend_phases=[(4, [1, 2]), (4, [2, 1])])
    wanted = build(one, [8, 0, 0], wanted)[0]
    for fields in ({"blend": mix, "split": "1"}, {"blend_per_split": items([mix, None, None])}):
        found = build(one, [8, 0, 0], config(one, **fields, blend_phases=phases))[0]
        assert pairs_of(found) == pairs_of(wanted)
    found = one.BlendedDataset(wanted.datasets, None, None, wanted.config, phases=phases)
    assert found.unique_description == wanted.unique_description
    four = np.int64(4)
    tokenizer = Tok(unique_identifiers={"file": path, "size": four})
    cfg = config(one, ([path], None), random_seed=four, sequence_length=four, tokenizer=tokenizer)
    train = build(one, [np.int64(20), 0, 0], cfg)[0]
    blend = one.BlendedDataset([train] * 2, np.float32([1, 0.5]), four, cfg)
    loader = loader_of(one, blend, four, micro_batch_size=four, dataloader_type="cyclic", seed=four)
    json.dumps(loader.state_dict())
    assert '"num_samples": 20' in blend.unique_description


# ==============================================================================
# 4. Index arrays
# ==============================================================================


def plan_by_counting(tokens, wanted, S, drop_last, x):
    """An EpochPlan: E by counting up, N by division, the last epoch by the 80 % rule."""
    epochs = 1
    while epochs * tokens < wanted * S + x:
        epochs += 1
    inputs = epochs * tokens - x
    num_samples = inputs // S if drop_last else math.ceil(inputs / S)
    before_final = max(0, (epochs - 1) * tokens - x) // S
    separate = epochs > 1 and wanted - before_final < int(0.80 * ((tokens - x) // S))
    return epochs, num_samples, separate, before_final


def test_epochs_are_counted_one_by_one(one):
    """Upstream loops for ever without tokens, and counts short samples in float32."""
    counts = list(itertools.product(range(1, 9), range(-9, 9), range(1, 6)))
    counts += [(101, 179, 1), (101, 180, 1)]  # 79 and 80 of the last epoch's 100 samples
    for stream, drop_last, x in itertools.product(counts, (False, True), (0, 1)):
        plan = one.plan_epochs(*stream, drop_last, bool(x))
        assert plan == plan_by_counting(*stream, drop_last, x), (stream, drop_last, x)
    assert one.plan_epochs(0, 0, 4) == (1, 0, False, 0)
    S = 2**20
    wanted = 2**70  # more than a float counts
    tokens = wanted * S + 1
    plan = one.plan_epochs(13, wanted, S)
    assert 13 * (plan.num_epochs - 1) < tokens <= 13 * plan.num_epochs
    assert one.count_samples(tokens, S, False) == one.count_samples(tokens + 1, S) == wanted
    assert one.count_samples(tokens + 1, S, False) == wanted + 1
    few = [1000, 4000, S]  # as numbers of numpy, whose product would wrap
    for kind in (np.int32, np.int64, torch.tensor):
        assert one.plan_epochs(*map(kind, few)) == one.plan_epochs(*few)
    assert one.count_samples(np.uint8(0), np.uint8(4)) == 0


def int32(*values):
    return np.array(values, np.int32)


def cut_into_samples(sizes, S, drop_last, x):
    """The sample index of all documents by brute force: lay all tokens end to end, and cut."""
    stream = [(d, place) for d, size in enumerate(sizes) for place in range(size)]
    inputs = max(0, len(stream) - x)
    num_samples = inputs // S if drop_last else math.ceil(inputs / S)
    rows = [(0, 0)]
    for k in range(1, num_samples + 1):  # behind sample k - 1, x tokens back: they are read again
        d, place = stream[min(k * S + x, len(stream)) - 1]
        rows.append((d, place + 1 - x))
    if num_samples * S > len(stream) and not x:  # upstream: the end of the last document
        rows[-1] = (len(sizes) - 1, sizes[-1])
    return np.array(rows, np.int32)


def test_sample_indices_by_brute_force(mm):
    """The corpora have up to three documents of up to three tokens; section 5 has larger ones."""
    small = [sizes for n in range(4) for sizes in itertools.product(range(4), repeat=n)]
    lengths = [1, 2, 3, 5, 2**31 - 1, 2**31, 2**32 - 1]
    for sizes, S, drop_last, x in itertools.product(small, lengths, (True, False), (1, 0)):
        documents = np.arange(len(sizes), dtype=np.int32)
        found = mm.build_sample_idx(int32(*sizes), documents, S, 1, sum(sizes), drop_last, x)
        same(found, cut_into_samples(sizes, S, drop_last, x), (sizes, S, drop_last, x))


def test_sample_index_does_not_overflow(mm):
    """An order of so many documents or samples would take 16 GB: only the dtype that it gets."""
    S = 2**30
    documents = int32(0, 1, 0, 0)  # they begin at 0, 2**31 - 1, 2**31, 2**32 - 1
    rows = mm.build_sample_idx(int32(2**31 - 1, 1), documents, S, 1, 3 * 2**31 - 2)
    assert rows.tolist() == [[0, 0], [0, S], [2, 0], [2, S], [3, 1], [3, S + 1]]
    assert [mm._sample_index_dtype(n) for n in (2**31 - 1, 2**31)] == [np.int32, np.int64]
    assert [mm._shuffle_index_dtype(n) for n in (2**32 - 3, 2**32 - 2)] == [np.uint32, np.int64]
    arrays = np.zeros(400, np.int16), np.zeros(400, np.int64)
    mm.build_phase_indices(*arrays, [(np.uint8(200), [1])] * 2)
    assert arrays[1][-1] == 399


def test_a_number_that_is_not_whole_is_not_cut(one, tmp_path):
    """A number that int32 does not hold is not wrapped; whole numbers may have any type."""
    random_state = np.random.RandomState(0)
    numpys = np.array([1, 2**31]), np.array([0.0, 1.0]), np.array([1], np.uint64)
    for documents in ([0.9, 1.9], [1, -1], [-(2**31) - 1], [2**70], *numpys[:2]):
        with pytest.raises(ValueError, match="document: .*whole number from 0 to 2147483647"):
            one.build_document_index(documents, 1, random_state, False)
        raises(ValueError, "document: ", one.build_stable_orders, documents, [0, 2], 1234)
    for documents in ([np.uint8(1)], torch.tensor([1]), numpys[2]):
        assert one.build_document_index(documents, 2, random_state, False).tolist() == [1, 1]
    for function, *arguments in (
        (one.build_shuffle_index, 6, 6.5, random_state),
        (one.build_stable_orders, [1], [0, 2.5], 1234),
        (one.plan_epochs, 13, 1.5, 4),
    ):
        raises(TypeError, None, function, *arguments)
    prefix = mk(one, tmp_path / "p", [[1] * 20])
    for size in (100.9, np.float32(0.5), math.nan, math.inf, "5", -1, torch.tensor(4.7)):
        raises(ValueError, "num_samples: expected a whole number", gpt, one, prefix, size)
    for size in (5.0, np.uint8(5), torch.tensor(5)):
        assert repr(gpt(one, prefix, size).num_samples) == "5"


def test_wrong_stream_raises(mm):
    """Upstream reads behind its arrays."""
    for wrong, error, word in (
        ({"sizes": np.array([4, 3, 6])}, TypeError, "sizes"),
        ({"sizes": int32(8, -1, 6)}, ValueError, "sizes: document 1 .* -1"),
        ({"document_indices": np.ones((3, 1), np.int32)}, ValueError, "document_indices"),
        ({"document_indices": int32(0, 3, 2)}, IndexError, r"document_indices\[1\] is 3; .* 3 seq"),
        ({"document_indices": int32(0, -1, 2)}, IndexError, r"document_indices\[1\] is -1; "),
        ({"tokens_per_epoch": 14, "sequence_length": 13}, ValueError, "14 tokens, .* have 13"),
        ({"sequence_length": 0}, ValueError, "sequence_length"),
    ):
        raises(error, word, mm.build_sample_idx, **good_arguments("build_sample_idx") | wrong)


def most_bytes(function, *arguments):
    """The memory that a call takes at once, but for torch's."""
    tracemalloc.start()
    function(*arguments)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_peak_memory_is_near_the_size_of_the_result(one, tmp_path):
    """The bytes of an entry.  Upstream: int64 in between, masks of float32, or lists of Python."""
    documents = np.arange(20_000, dtype=np.int32)
    peak = most_bytes(one.build_document_index, documents, 10, np.random.RandomState(0), False)
    assert peak < 5 * 200_000  # it has 4
    with mock.patch.object(one, "torch", None):  # whose memory is not counted
        assert most_bytes(one.causal_mask, [0, 5], 500) < 4 * 500**2  # 1 and two more
    builder = one.IndexedDatasetBuilder(tmp_path / "p.bin", np.uint8)
    peak = most_bytes(builder.add_sequences, b"", np.zeros(100_000, np.int32))
    assert peak < 28 * 100_000  # 4, and a list in between
    builder.add_document(np.ones(200_000, np.uint8), [1] * 200_000)
    assert most_bytes(builder.finalize, tmp_path / "p.idx") < 24 * 300_000  # 16 and a buffer
    for kind in SHUFFLED:
        batches = iter(sampler_of(one, kind, 200_000, 0, 1, 0, 1))
        assert most_bytes(next, batches) < 200_000  # torch's order is not counted


def random_parity_flags(rng):
    """All fields of a config that change orders or samples, as far as upstream has them."""
    names = ["add_extra_token_to_sequence", "drop_last_partial_validation_sequence"]
    names += ["reset_position_ids", "eod_mask_loss", "create_attention_mask"]
    flags = {name: bool(rng.integers(2)) for name in names}
    flags["reset_attention_mask"] = flags["create_attention_mask"] and bool(rng.integers(2))
    flags["sequence_length"] = int(rng.integers(1, 12))
    flags["random_seed"] = int(rng.integers(2**32))
    return flags


def orders_by_numpy(ds):
    """document_index and shuffle_index: piles of epochs, each of them shuffled by numpy."""
    cfg = ds.config
    S = cfg.sequence_length
    x = int(cfg.add_extra_token_to_sequence)
    tokens = int(ds.dataset.sequence_lengths[ds.indices].sum())
    drop_last = ds.index_split.name != "valid" or cfg.drop_last_partial_validation_sequence
    num_epochs, N, separate, _ = plan_by_counting(tokens, ds.num_samples or 0, S, drop_last, x)
    ends = np.minimum(np.arange(1, N + 1) * S + x, num_epochs * tokens)
    epochs = (ends - 1) // tokens  # in which the last token of each sample is
    together = num_epochs - int(separate)
    shared = np.random.RandomState(cfg.random_seed)
    piles = [(shared, range(together)), (shared, range(together, num_epochs))]
    if cfg.stable_order:
        seeds = [cfg.random_seed] + [[cfg.random_seed, epoch] for epoch in range(1, num_epochs)]
        piles = [(np.random.RandomState(seed), [epoch]) for epoch, seed in enumerate(seeds)]
    documents = [state.permutation(np.tile(ds.indices, len(pile))) for state, pile in piles]
    samples = [state.permutation(np.flatnonzero(np.isin(epochs, pile))) for state, pile in piles]
    return np.concatenate(documents).astype(np.int32), np.concatenate(samples).astype(np.uint32)


# ==============================================================================
# 5. GPTDataset
# ==============================================================================


INTEGERS = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16]  # dtypes of token ids


def arrays(ds):
    """Copies of the three arrays of a GPTDataset."""
    return [np.array(ds.document_index), np.array(ds.sample_index), np.array(ds.shuffle_index)]


def same_arrays(found, wanted, note=""):
    for a, b in zip(found, wanted, strict=True):
        same(a, b, note)


def file_of(folder, ending):
    """The one file of a folder whose name ends so."""
    [path] = [path for path in pathlib.Path(folder).iterdir() if path.name.endswith(ending)]
    return path


def batch_of(ds, indices):
    """These samples as a loader makes a batch of them."""
    for cls in type(ds).__mro__:
        module = sys.modules[cls.__module__]
        if hasattr(module, "_make_batch"):
            return module._make_batch(ds, indices)


def read_in_all_ways(ds, indices):
    """Lists of these samples: read one by one, several at once, and cut out of a batch."""
    batch = batch_of(ds, indices)
    rows = [{key: batch[key][row] for key in batch} for row in range(len(indices))]
    return [ds[k] for k in indices], ds.__getitems__(indices), rows


def check_refused(ds, k, error, words=None):
    """Sample k cannot be read: not alone, not among several, not in a batch."""
    for read, *arguments in ((ds.__getitem__, k), (ds.__getitems__, [0, k]), (batch_of, ds, [k])):
        raises(error, words, read, *arguments)


def brute_sample(ds, whole, k):
    """Sample k of a GPTDataset, cut out of all its tokens, whole; its keys are in order."""
    cfg = ds.config
    S = cfg.sequence_length
    pad = cfg.tokenizer.pad
    begin = int(ds.shuffle_index[k]) * S
    text = whole[begin : begin + S + int(cfg.add_extra_token_to_sequence)].tolist()
    text += [pad] * (S + 1 - len(text))
    tokens, labels = np.array(text[:-1]), np.array(text[1:])

    # which document each input is in: by its place in the stream (padding belongs to the last), and
    # by the eods before it
    lengths = ds.dataset.sequence_lengths[ds.document_index]
    by_place = np.repeat(np.arange(len(lengths)), lengths)[begin : begin + S].tolist()
    by_place += by_place[-1:] * (S - len(by_place))
    by_eods = [text[:at].count(cfg.tokenizer.eod) for at in range(S)]
    of_masks = np.array(by_eods if cfg.reset_attention_mask else [0] * S)
    of_positions = by_eods if cfg.reset_position_ids else [0] * S
    if cfg.inter_document_masking:
        of_positions = by_place

    loss_mask = np.where(labels == pad, np.float32(0), np.float32(1))
    if cfg.eod_mask_loss:
        loss_mask[tokens == cfg.tokenizer.eod] = 0
    sample = {"tokens": np.where(tokens == pad, 0, tokens)}
    sample["labels"] = np.where(labels == pad, 0, labels)
    if cfg.create_attention_mask and not cfg.inter_document_masking:
        is_later = np.arange(S) > np.arange(S)[:, None]
        sample["attention_mask"] = [is_later | (of_masks != of_masks[:, None])]
    sample["loss_mask"] = loss_mask
    sample["position_ids"] = [at - of_positions.index(of_positions[at]) for at in range(S)]
    if cfg.inter_document_masking:
        starts = [at for at in range(S) if by_place.index(by_place[at]) == at]
        sample["cu_seqlens"] = int32(*starts, *[S] * (S + 1 - len(starts)))
        sample["max_seqlen"] = np.max(np.diff(sample["cu_seqlens"]))
    return {key: torch.tensor(values) for key, values in sample.items()}


@pytest.mark.filterwarnings("ignore")
def test_orders_and_samples_equal_the_loops(mm, tmp_path):
    """Under every flag, from every dtype, mapped or not."""
    for case, rng in enumerate(cases(16)):
        flags = random_parity_flags(rng) | {"tokenizer": Tok(pad=int(rng.choice([-1, 4])))}
        flags |= {"stable_order": case % 2 == 1, "mmap_bin_files": bool(rng.integers(2))}
        if rng.random() < 0.3:
            flags |= {"inter_document_masking": True, "reset_attention_mask": False}
        docs = random_docs(rng, most=rng.choice([3, 20]), vocab=5)  # 0 is eod
        documents = rng.permutation(len(docs))
        if rng.random() < 0.5:
            documents = np.arange(rng.integers(len(docs)), len(docs))
        prefix = mk(mm, tmp_path / f"{case}/p", docs, INTEGERS[case % len(INTEGERS)])
        n = int(rng.choice([0, rng.integers(100)]))
        split = rng.choice(["train", "valid", "valid"])
        ds = gpt(mm, prefix, n or None, split, documents, **flags)
        document_index, shuffle_index = orders_by_numpy(ds)
        same(ds.document_index, document_index)
        same(ds.shuffle_index, shuffle_index)
        assert len(ds) == len(shuffle_index) >= n
        if len(ds) == 0:
            continue
        whole = np.concatenate([ds.dataset[int(i)] for i in document_index])
        some = [-1, 0, *rng.integers(len(ds), size=5).tolist()]
        wanted = {k: brute_sample(ds, whole, k) for k in some}
        wanted[None] = wanted[0] | {"loss_mask": torch.zeros(ds.config.sequence_length)}
        assert (ds.dataset.mapped_tokens is not None) == ds.config.mmap_bin_files
        for samples in read_in_all_ways(ds, list(wanted)):
            same_batches(samples, wanted.values(), (case, list(wanted), ds.config))


@pytest.mark.parametrize("flag", ["create_attention_mask", "inter_document_masking"])
def test_samples_have_whole_numbers_and_memory_of_their_own(mm, tmp_path, flag):
    """They share no memory with the corpus, here of int64.  Upstream shares masks."""
    ds = gpt(mm, mk(mm, tmp_path / "p", [np.arange(30)], np.int64), **{flag: True})
    for data in (ds, mm.BlendedDataset([ds, ds], [1, 2], 3, ds.config)):
        for k in (1.0, "1"):
            check_refused(data, k, TypeError)
        for k in (3, -4, 2**32, 2**63):
            check_refused(data, k, IndexError, f"index {k} ")
        same_samples(batch_of(data, np.array([0, 1])), batch_of(data, [0, torch.tensor(1)]))
        one_by_one, several, _ = read_in_all_ways(data, [0, 1, 0, None])
        arrays = [ds.dataset[0], ds.shuffle_index]
        for sample in [*one_by_one, *several, batch_of(data, [0, 1])]:
            arrays += [tensor.numpy() for tensor in sample.values()]
        assert not any(itertools.starmap(np.shares_memory, itertools.combinations(arrays, 2)))


PADS = {  # a tokenizer, the pad id that counts, and the one where it may be ambiguous
    "there is none": (Tok(), -1, -1),
    "it is no other special token": (Tok(pad=7), 7, 7),
    "it is eod": (Tok(pad=0), -1, 0),
    "it is eos": (Tok(pad=8, eos=8), -1, 8),
    "it is in the dict": (Tok(pad=9, special_tokens_dict={"bos": 9}), -1, 9),
    "the dict is empty": (Tok(pad=0, special_tokens_dict={}), -1, 0),
    "the dict does without eod": (Tok(pad=0, special_tokens_dict={"bos": 9}), 0, 0),
    "the dict names it pad_token": (Tok(pad=9, special_tokens_dict={"pad_token": 9}), 9, 9),
}


def test_pad_and_eod_ids(one, tmp_path):
    """A warning: a pad that is also another special token is not used; a corpus has no eod."""
    with_eod = mk(one, tmp_path / "with", [[1, 2, 0]] * 9)
    without = mk(one, tmp_path / "without", [[1, 2, 3]] * 9)
    for case, (tokenizer, pad, if_allowed) in PADS.items():
        for allowed, wanted in ((False, pad), (True, if_allowed)):
            fields = {"tokenizer": tokenizer, "allow_ambiguous_pad_tokens": allowed}
            ds, messages = heard(gpt, one, without, **fields)
            assert ds._pad_token_id == wanted, case  # upstream's name, too
            words = f"pad id {if_allowed} .* or set allow_ambiguous_pad_tokens"
            warned = [re.search(words, message) is not None for message in messages]
            assert warned == ([] if wanted == if_allowed else [True]), case
    for flag in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        fields = {"create_attention_mask": True, flag: True}
        for prefix, wanted in ((without, [True]), (with_eod, [])):
            _, messages = heard(gpt, one, prefix, 1, path_to_cache=f"{prefix} {flag}", **fields)
            assert ["--append-eod" in message for message in messages] == wanted, flag


def test_invalid_dataset_arguments_raise(one, tmp_path):
    """Upstream never returns from a split without tokens."""
    prefix = mk(one, tmp_path / "p", [[1] * 9] * 3)
    for documents, error, words in (
        ([], ValueError, "/p, train: num_samples is 1, .* no tokens; .* split .* no samples$"),
        ([0, 3], IndexError, "index 3 "),
        ([True, False], TypeError, "integers, got bool"),
    ):
        raises(error, words, gpt, one, prefix, 1, documents=np.array(documents))


@pytest.mark.parametrize("extra", [True, False])
def test_wrong_entries_of_arrays_are_refused(mm, toy, extra):
    """A sample that meets a wrong entry raises an error."""
    # Sample 1 is between the rows (1, 0) and (2, 1); without the extra token, row 1 is (0, 4).
    good = gpt(mm, toy, 3, sequence_length=4, add_extra_token_to_sequence=extra)
    for name, place, value in (
        ("sample_index", (1, 0), -1),
        ("sample_index", (1, 1), -1),
        ("sample_index", (1, 1), 99),
        ("sample_index", (2, 0), -2),
        ("sample_index", (2, 0), 0),
        ("sample_index", (2, 0), 3),
        ("sample_index", (2, 1), -1),
        ("sample_index", (2, 1), 2),
        ("document_index", 1, 3),
        ("document_index", 2, -1),  # the number of the same one, counted from the end
        ("shuffle_index", 0, 3),
    ):
        ds = copy.copy(good)
        k = place if name == "shuffle_index" else ds.shuffle_index.tolist().index(1)
        setattr(ds, name, np.array(getattr(ds, name)))
        getattr(ds, name)[place] = value
        advice = f", sample {k}: .* delete the cache folder" if name == "shuffle_index" else ""
        check_refused(ds, k, IndexError, re.escape(toy) + advice)
    several = np.resize(good.shuffle_index, 6)
    for order, k in ((several[:2], 2), (several, 3), (several, -4), (np.full(3, -3), 0)):
        ds = copy.copy(good)
        ds.shuffle_index = order
        check_refused(ds, k, IndexError)


# -- subclasses --------------------------------------------------------------------------------


@pytest.mark.parametrize("calls_super", [True, False])
def test_a_subclass_may_have_other_orders(mm, tmp_path, monkeypatch, calls_super):
    """They are asked for each time.  None but these are built, and only super()'s have a cache."""

    class InOrder(mm.GPTDataset):
        def _build_document_sample_shuffle_indices(self):
            if calls_super:
                documents, samples, order = super()._build_document_sample_shuffle_indices()
                return documents, samples, np.sort(order)
            rows = np.array([[0, 0], [0, 8], [0, 16]], np.int32)
            return int32(0), rows, np.array([0, 1], np.uint32)

    prefix = mk(mm, tmp_path / "p", [np.arange(100)])
    plain = gpt(mm, prefix)
    before = files_of(tmp_path)
    if not calls_super:
        monkeypatch.setattr(mm.GPTDataset, "_build_arrays", None)
    for _ in range(2):
        ds = gpt(mm, prefix, cls=InOrder)
        again = InOrder.__new__(InOrder)  # as a pickle does, which a class of a test's own has not
        again.__setstate__(ds.__getstate__())
        for each in (ds, again):
            same(batch_of(each, [1, 0])["tokens"], np.arange(16).reshape(2, 8)[::-1])
        assert ds.epoch_plan == (plain.epoch_plan if calls_super else None)
        assert ("sample_index" in ds.__getstate__()) != calls_super
    assert (files_of(tmp_path) == before) != calls_super


def test_a_subclass_keeps_its_own_method(mm, tmp_path):
    """Here the sample behind the one that is asked for; also in a blend with one that C reads."""

    class Next:
        def __getitem__(self, k):
            return super().__getitem__(k + 1)

    prefix = mk(mm, tmp_path / "p", [np.arange(90)] * 3)
    plain = gpt(mm, prefix)
    own = gpt(mm, prefix, cls=type("Own", (Next, mm.GPTDataset), {}))
    blend = mm.BlendedDataset([own, plain], [1, 1], 10, plain.config)
    found = [samples[::2] for samples in read_in_all_ways(blend, range(10))]
    own_blend = type("OwnBlend", (Next, mm.BlendedDataset), {})
    for data in (own, own_blend([plain], [1], 10, plain.config)):
        found += read_in_all_ways(data, range(5))
    for samples in found:
        for k, sample in enumerate(samples):
            same(sample["tokens"], plain[k + 1]["tokens"])


def test_a_subclass_may_return_other_tokens_and_lengths(mm, tmp_path):
    """Lengths of documents as in upstream's newest class; tokens, which stay, are filled up."""
    kept = np.arange(10)

    class Own(mm.GPTDataset):
        def _query_document_sample_shuffle_indices(self, k):
            return kept[:k] if k < 11 else kept[:9] / 2, [], [2, 0, 3, 4]

    prefix = mk(mm, tmp_path / "p", [np.arange(90)])
    own = gpt(mm, prefix, cls=Own, tokenizer=Tok(pad=7), inter_document_masking=True)
    for whole, short in read_in_all_ways(own, [9, 5]):
        assert whole["cu_seqlens"].tolist() == [0, 2, 5, 8, 8, 8, 8, 8, 8]
        assert whole["tokens"].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
        assert short["tokens"].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
        assert short["loss_mask"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    same(kept, np.arange(10))
    check_refused(own, 10, IndexError, "/p: .* 10 tokens, expected at most 9; .*subclass")
    check_refused(own, 11, TypeError, "Cannot cast .*float64")


# ==============================================================================
# 6. BlendedDataset
# ==============================================================================


def blend_by_a_loop(phases, most=None):
    """[(dataset, its sample), ...]: always of the first dataset with the largest lag.

    phases   [(samples, weights), ...]: in each the lags begin anew, and who has no weight is out
    most     how many samples each dataset has; None: no end of them
    """
    given = collections.Counter()
    pairs = []
    for samples, weights in phases:
        taken = [0] * len(weights)
        ends = [math.inf] * len(weights) if most is None else most
        for i in range(samples):
            lags = []
            for weight, count, end in zip(weights, taken, ends, strict=True):
                competes = weight > 0 and count < end
                lags.append(weight * max(i, 1) - count if competes else -math.inf)
            d = lags.index(max(lags))
            pairs.append((d, given[d]))
            taken[d] += 1
            given[d] += 1
    return pairs


def test_blends_by_a_loop(mm):
    """The arrays are longer than the blend.  Upstream has arrays of all weights on its stack."""
    for rng in cases(12):
        n = int(rng.choice([rng.integers(1, 40), rng.integers(33, 300)]))  # C has loops for both
        shapes = [rng.random(n), rng.integers(1, 4, n), rng.dirichlet(np.full(n, 0.2)), np.ones(n)]
        weights = shapes[rng.integers(4)] + 1e-9  # with ties, near ties and tiny ones
        weights /= weights.sum()
        size = int(rng.integers(0, 600 if n < 33 else 150))
        sizes = rng.integers(0, 2 + 200 // n, n)
        total = int(sizes.sum())
        of_weights = blend_by_a_loop([(size, weights.tolist())])
        of_sizes = blend_by_a_loop([(total, (sizes / max(total, 1)).tolist())], sizes.tolist())
        of_limits = blend_by_a_loop([(total, weights.tolist())], sizes.tolist())
        for function, inputs, wanted in (
            (mm.build_blending_indices, (weights, n, size), of_weights),
            (mm.build_exhaustive_blending_indices, (sizes, n), of_sizes),
            (mm._fill_blend, (weights, sizes.astype(float), total), of_limits),
        ):
            outputs = np.full(len(wanted) + 1, 77, np.int16), np.full(len(wanted) + 1, 77)
            function(*outputs, *inputs)
            assert list(zip(*lists(outputs), strict=True)) == [*wanted, (77, 77)], inputs
    which, sample = np.zeros(50, np.int16), np.zeros(50, np.int64)
    mm.build_blending_indices(which, sample, np.full(32766, 1 / 32766), 32766, 50)
    assert which.tolist() == list(range(50))
    raises(ValueError, "32766", mm.build_blending_indices, which, sample, np.ones(32767), 32767, 5)


def blended(mm, sizes, weights, size, phases=None, **fields):
    """A blend of datasets of so many samples, which need no kernel."""
    cfg = config(mm, (["x"], None), **fields)
    datasets = [Bare(n, mm.Split.train) for n in sizes]
    return mm.BlendedDataset(datasets, weights, size, cfg, phases=phases)


def test_a_blend_by_counts(mm):
    """Without a size, weights are counts; the arrays of a subclass are counted when it is asked."""

    class Own(mm.BlendedDataset):
        def _build_indices(self):
            return np.zeros(3, np.int16), np.arange(3)

    own = Own(2 * [Bare(9, mm.Split.train)], [1, 1], 3, config(mm))
    same(own.samples_taken(), np.array([3, 0]))
    ds = blended(mm, [9, 20_000], [9.0, 20_000.0], None)  # more than are counted at a time
    same(ds.samples_taken(), np.array([9, 20_000]))


def test_invalid_blends_raise(one):
    for arguments, word in (  # weights of two datasets, size, phases
        (([1, math.nan], 4), "weight of bare"),
        (([1, math.inf], 4), "weight of bare"),
        (([0, 0], 4), "sum"),
        ((2, 4), "length 2, got 2"),
        (([1.5, 2.5], None), r"^weights: .* whole numbers of samples, got \[1\.5, 2\.5\]"),
        # more than there are, which in upstream is an IndexError in the run
        (([1, 3], 14), "takes 10 samples from bare, which has 9; .* larger"),
        (([1, 1], None, [(4, [1, 1])]), "None"),  # phases stand for weights and size
        ((None, 4, [(4, [1, 1])]), "None"),
        ((None, None, []), "phases: .* got"),
        (([1, 1], -1), "size: .*-1"),
        ((None, None, [(0, [1, 1])]), "phase 0: samples: .* at least 1, got 0"),
        ((None, None, [(4, [1, 1]), (4, [1])]), r"phase 1: weights: .* length 2, got \[1\]"),
    ):
        raises(ValueError, word, blended, one, [9, 9], *arguments)
    blend = functools.partial(one.BlendedDataset, config=config(one))
    twice = [Bare(9, one.Split.train)] * 2
    raises(ValueError, "takes 15 samples from bare", blend, twice, [3, 1], 20)
    pathless = 2 * [Wrapped(index_split=one.Split.train, unique_identifiers={})]
    raises(ValueError, "takes 75 samples from Wrapped", blend, pathless, [3, 1], 100)
    parts = [Bare(9, one.Split[name]) for name in ("valid", "train")]
    raises(ValueError, r"of one split, got \['train', 'valid'\]", blend, parts, [1, 1], 4)
    fill = one.build_phase_indices
    raises(ValueError, r"weights of a phase: .* got \[0, 0\]", fill, *BLEND, [(4, [0, 0])])
    raises(TypeError, "dataset_index must be an array of int16", fill, *BLEND[::-1], [(4, [1])])


def pairs_of(ds):
    return list(zip(ds.dataset_index.tolist(), ds.dataset_sample_index.tolist(), strict=True))


def test_phases_by_a_loop(mm):
    """A dataset without weight gives nothing.  One phase of all datasets is the plain blend."""
    for rng in cases(40):
        num_datasets = int(rng.integers(1, 6))
        phases = []
        for _ in range(rng.integers(2, 6)):
            weights = rng.integers(0, 6, num_datasets) * rng.choice([1, 0.3])
            weights[rng.integers(num_datasets)] += 1
            phases.append((int(rng.integers(1, 40)), weights.tolist()))
        sizes = [999] * num_datasets
        ds = blended(mm, sizes, None, None, phases)
        assert pairs_of(ds) == blend_by_a_loop(ds.phases), phases
        first = blended(mm, sizes, None, None, phases[:1])
        samples, weights = phases[0]
        assert pairs_of(first) == pairs_of(ds)[:samples]
        if all(weights):
            plain = blended(mm, sizes, weights, samples)
            assert first.unique_description == plain.unique_description


def test_phases_are_in_the_key(one, tmp_path):
    phases = [(4, [1, 3]), (4, [1, 1])]
    kinds = [phases, phases[:1], phases[::-1], [(5, [1, 3]), (3, [1, 1])], [(4, [1, 3])] * 2]
    kinds += [[(4, [0, 1])], [(4, [1, 0])], [(4, [0, 1]), (4, [1, 0])], [(8, [1, 3])]]
    for kind in kinds * 2:  # the second time from the cache
        ds = blended(one, [9, 9], None, None, kind, path_to_cache=str(tmp_path))
        assert pairs_of(ds) == pairs_of(blended(one, [9, 9], None, None, kind))
    assert len(os.listdir(tmp_path)) == 4 * len(kinds)


def test_a_blend_has_the_samples_of_its_datasets(mm, tmp_path):
    """Made as their own configs say.  None is sample 0 of the dataset of sample 0, without loss."""
    rng = np.random.default_rng(0)
    dtypes = ["uint8", "uint16", "int64"]
    prefixes = [mk(mm, tmp_path / dtype, random_docs(rng, vocab=5), dtype) for dtype in dtypes]
    for fields, of_last in (  # of the blend and its datasets, of its last dataset
        ({"create_attention_mask": True, "reset_attention_mask": True}, {}),
        ({"inter_document_masking": True}, {}),
        ({"reset_position_ids": True, "eod_mask_loss": True, "mmap_bin_files": False}, {}),
        ({}, {"eod_mask_loss": True, "random_seed": 5}),
    ):
        ds = quiet(build, mm, [30, 0, 0], config(mm, (prefixes, [1, 2, 3]), **fields))[0]
        if of_last:
            ds.datasets[2] = quiet(gpt, mm, prefixes[2], 30, **of_last)
        indices = [7, 0, None, 29, 7, -1, 3, *range(12)]
        places = pairs_of(ds)
        wanted = []
        for i in indices:
            d, k = (places[0][0], None) if i is None else places[i]
            wanted.append({"dataset_id": torch.tensor(d), **ds.datasets[d][k]})
            assert wanted[-1]["loss_mask"].any() == (i is not None)
        for samples in read_in_all_ways(ds, indices):
            same_batches(samples, wanted)


def test_what_a_repr_says(one, tmp_path):
    """A blend shows its first 20 datasets, of any class."""
    path = mk(one, tmp_path / "p", [[1] * 20] * 3, np.uint16)
    part = gpt(one, path, 20)
    own = gpt(one, path, 20, cls=type("Own", (one.GPTDataset,), {}))
    own.epoch_plan = None
    made_up = build(one, [9, 0, 0], config(one), one.MockGPTDataset)[0]
    S = "sequence_length=8"
    for dataset, words in (
        (part.dataset, f"IndexedDataset({path!r}, sequences=3, tokens=60, dtype=uint16)"),
        (part, f"GPTDataset({path!r}, train, samples=22, {S}, epochs=3)"),
        (own, f"Own({path!r}, train, samples=22, {S})"),
        (made_up, f"MockGPTDataset(None, train, samples={len(made_up)}, {S}, epochs=1)"),
    ):
        assert repr(dataset) == words
    parts = [part, own, *[Bare(99, one.Split.train)] * 24]
    lines = repr(one.BlendedDataset(parts, [11, 9, *[1] * 24], 44, part.config)).splitlines()
    assert lines[:2] == ["BlendedDataset(train, samples=44)", f"  0: {path}, samples=11, epochs=3"]
    assert lines[2] == f"  1: {path}, samples=9"
    assert lines[20:] == ["  19: bare, samples=1", "  and 6 more"]


# ==============================================================================
# 7. The builder
# ==============================================================================
# What several ranks do is tested in section 17.

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


def parts_of(dataset):
    """Its path, number of documents, and num_samples; of a blend a list of these."""
    if dataset is None:
        return None
    if hasattr(dataset, "datasets"):
        return [parts_of(part) for part in dataset.datasets]
    return dataset.dataset_path, len(dataset.indices), dataset.num_samples


def test_which_datasets_a_config_means(mm, corpora, caplog):
    """A weight of 0 opens nothing; phases are for train, and each corpus lasts for all of them."""
    short = mk(mm, "in/short", [[1, 2]])  # which has no sample
    total = sum(len(gpt(mm, prefix)) for prefix in corpora)
    epoch = {"blend": ([A, short, B, C], None)}
    of_epoch = [[(A, 40, None), (B, 25, None), (C, 10, None)], None, None]
    cut = {"blend": ([A], None), "split": "1,1,0"}
    own = {"blend_per_split": [([A, "in/none", B], [1, 0.0, 3]), ([C], [7]), None]}
    phases = {"blend": (corpora, [0, 1, 1]), "split": "8,1,1"}
    phases |= {"blend_phases": [(9, [1, 1, 0]), (7, [0, 1, 2])]}
    of_phases = [[(A, 32, 6), (B, 20, 9), (C, 8, 6)], [(B, 2, 4), (C, 1, 4)]]
    of_phases.append([(B, 3, 4), (C, 1, 4)])
    of_one = {"blend_per_split": [([A], None), None, None], "blend_phases": [(9, [1]), (6, [1])]}
    no_share = ["5 samples are requested from test, which has none"]
    too_short = ["train: 1 of 4 corpora cannot fill one sample"]
    too_few = [*too_short, "1,000,000 samples are requested from train"]
    for sizes, fields, wanted, size, warned in (
        ([40, 5, 0], own, [[(A, 40, 11), (B, 25, 31)], (C, 10, 5), None], 40, []),
        ([None, None, None], epoch, of_epoch, None, too_short),
        ([total, 0, 0], epoch, of_epoch, total, too_short),
        ([10**6, 0, 0], epoch, of_epoch, total, too_few),
        ([0, 0, 0], {"blend": ([short, short], None)}, [None, None, None], None, []),
        ([0, 5, 5], cut, [(A, 20, 0), (A, 20, 5), None], None, no_share),
        ([15, 0, 0], of_one, [[(A, 40, 16)], None, None], 15, []),
        ([12, 5, 5], phases, of_phases, 16, []),
    ):
        built, messages = heard(build, mm, sizes, config(mm, **fields))
        assert [parts_of(dataset) for dataset in built] == wanted
        assert getattr(built[0], "size", None) == size
        assert [re.split("; |, which has only| .for", text)[0] for text in messages] == warned
    train, valid, _ = built
    assert train.phases == [(9, [0.5, 0.5, 0.0]), (7, [0.0, 1 / 3, 2 / 3])]
    assert train.datasets[2].dataset is valid.datasets[1].dataset, "each corpus is opened once"
    assert "dropped from the blend because their weight is 0: in/none" in caplog.text
    assert "weight is 0: in/short" not in caplog.text, "nobody gave it a weight"


def test_corpora_that_are_shorter_than_a_sample(one, tmp_path):
    """One warning for each split of which samples are wanted; a split without a sample is None."""
    docs = {"twenty": [[1] * 20], "three": [[1] * 3], "empty": [[]], "enough": [[1] * 70] * 100}
    twenty, three, empty, enough = (mk(one, tmp_path / name, docs[name]) for name in docs)
    both = [f"train: 2 of 2 .*{three} has 3 of 65 needed tokens.*sequence_length"]
    halves = {"split": "50,50,0"}
    of_21 = {"add_extra_token_to_sequence": False, "sequence_length": 21}
    for corpora, sizes, fields, built, warned in (
        ([twenty], [None, 0, 0], {}, [], [f"train: 1 of 1 .*{twenty} has 20 of 65 "]),
        ([twenty], [None, 0, 0], of_21, [], [" of 21 needed"]),
        ([twenty], [5, 0, 0], {}, [0], []),  # in several epochs
        ([three, twenty], [5, 0, 0], {}, [], both),
        ([three, empty, enough], [5, 0, 0], {}, [0], ["train: 1 of 3 .*three has 3"]),
        ([empty, empty], [5, 0, 0], {}, [], ["5 samples are requested from train"]),
        ([enough] * 3, [5, 0, 0], {"split": "98,1,1"}, [0, 1, 2], []),
        ([enough, twenty], [0, None, 0], halves, [0, 1], [f"valid: 1 of 2 .*{twenty} has 20"]),
    ):
        data = {"blend": (corpora, None), "split": "1", "sequence_length": 64} | fields
        found, messages = heard(build, one, sizes, config(one, **data))
        assert [number for number in range(3) if found[number] is not None] == built, corpora
        for message, words in zip(messages, warned, strict=True):
            assert re.search(words, message)
    for valid, samples in (([twenty, three], None), ([twenty, enough], [0, 109])):
        data = {"blend_per_split": [None, (valid, None), None], "multiple_validation_sets": True}
        found, messages = heard(build, one, [0, None, 0], config(one, sequence_length=64, **data))
        assert (found[1] and [len(dataset) for dataset in found[1]]) == samples
        assert len(messages) == 1 and "valid: " in messages[0]


def test_a_config_that_is_changed_later_changes_nothing(c, corpora, tmp_path):
    """Before the build or after it; a deep copy builds again with the seed of its name."""
    fields = {"random_seed": 5, "path_to_cache": str(tmp_path / "cache")}
    wanted = build(c, [40, 0, 0], config(c, ([A, B], [1, 2]), **fields))[0]
    cfg = config(c, ([A, B], [1, 2]), **fields)
    builder = c.BlendedMegatronDatasetBuilder(c.GPTDataset, [40, 0, 0], yes, cfg)
    cfg.random_seed = 7
    cfg.sequence_length = 16
    cfg.blend[0][0] = C
    found = builder.build()[0]
    shutil.rmtree(tmp_path / "cache")
    for dataset in (found, copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert c._can_use_c(dataset), "its datasets have its config"
        assert dataset.unique_description == wanted.unique_description
        same_batches([dataset[k] for k in range(40)], [wanted[k] for k in range(40)])
    by_hand = c.GPTDataset(found.datasets[0].dataset, A, range(9), 9, c.Split.train, cfg)
    assert by_hand.config is cfg


def test_a_corpus_that_would_be_exhausted_is_built_larger(one, tmp_path):
    """It alone; the documents have S tokens, so no corpus has a sample more than was asked for."""
    prefixes = [mk(one, tmp_path / str(d), [[1] * 8]) for d in range(12)]
    weights = np.random.default_rng(1).dirichlet(np.ones(12)).tolist()
    fields = {"mid_level_dataset_surplus": 0.0, "path_to_cache": str(tmp_path / "cache")}
    for _ in range(2):  # the second time from the cache
        train = build(one, [200, 0, 0], config(one, (prefixes, weights), **fields))[0]
        asked = np.array([math.ceil(200 * weight) for weight in train.weights])
        taken = np.bincount(train.dataset_index)
        assert 0 < np.count_nonzero(taken > asked) < 12
        wanted = np.maximum(asked, taken).tolist()
        assert parts_of(train) == [(p, 1, n) for p, n in zip(prefixes, wanted, strict=True)]


def test_datasets_of_the_users_own_are_built_side_by_side(one):
    """Two methods more, and the builder can build them, as many at once as there are threads."""
    all_threads = threading.Barrier(2, timeout=20)

    class Numbers(one.MegatronDataset):
        build_low_level_dataset = mock.Mock(return_value=range(10, 20))
        numel_low_level_dataset = len

        def __init__(self, numbers, path, documents, *others):
            all_threads.wait()
            assert isinstance(documents, np.ndarray), "as upstream gives them to a class"
            super().__init__(numbers, path, documents, *others)

        def __len__(self):
            return len(self.indices)

        def __getitem__(self, idx):
            return {"number": self.dataset[self.indices[idx]]}

    cfg = config(one, (["ten", "too"], [3, 1]), split="5,5,0", num_dataset_builder_threads=2)
    train, valid, test = build(one, [3, 3, 0], cfg, Numbers)
    assert (parts_of(train), test) == ([("ten", 5, 4), ("too", 5, 2)], None)
    assert batch_of(valid, [0, 1, 2])["number"].tolist() == [15, 15, 16]
    for method, *arguments in (("build_low_level_dataset", 1, 2), ("numel_low_level_dataset", 1)):
        missing = getattr(one.MegatronDataset, method)
        raises(NotImplementedError, rf"^{method}\(\) is missing; define it", missing, *arguments)


def test_what_a_builder_refuses(one, corpora):
    """A pair without a record may be of any tokenizer.  Upstream builds pairs of several."""
    two = ([A, B], [1, 1])
    sets = {"blend_per_split": [None, two, two], "multiple_validation_sets": True}
    for prefix, name in ((A, "bytes"), (B, "BPE")):
        one._write_record(prefix, {"class": name}, [])
    other_tokenizer = f"{B} was made .* than {A}: its class is 'BPE', not 'bytes'; preprocess"
    for sizes, fields, words in (
        ([0, -1, 0], {"blend": two}, "sizes: .*-1"),
        ([0, None, None], sets, "test: the size .*None; give"),  # valid is a list, test a blend
        ([0, 5, 9], sets | {"full_validation": True}, "must be None"),
        ([20, 0, 0], {"blend": two, "blend_phases": [(16, [1, 1])]}, "20 samples, .* 16; add"),
        ([9, 0, 0], {}, "no blend is given"),
        ([9, 0], {"blend": two}, r"sizes: expected 3 \(train, valid, test\), got 2"),
        ([5, 5, 0], {"blend_per_split": [([A, C], None), ([B], None), None]}, other_tokenizer),
    ):
        raises(ValueError, words, quiet, build, one, sizes, config(one, **fields))
    full = {"multiple_validation_sets": True, "full_validation": True}
    for valid, wanted in ((([A], None), (A, 40, 5)), (([A], [2]), (A, 40, 5)), (None, None)):
        fields = full | {"blend_per_split": [([A, C], None), valid, None]}
        built = quiet(build, one, [5, 5, 0], config(one, **fields))
        assert parts_of(built[1]) == wanted, "only several sets may have no size, as in upstream"
    huge = {"numel_low_level_dataset": mock.Mock(return_value=2**31)}  # upstream: the numbers wrap
    huge["_build_arrays"] = None  # which would take 8 GiB
    with mock.patch.multiple(one.GPTDataset, **huge), pytest.raises(ValueError, match="2147483648"):
        build(one, [9, 0, 0], config(one, ([A], None)))
    ends = mock.patch.object(one.GPTDataset, "_build_arrays", side_effect=StopIteration("ends"))
    with ends, pytest.raises(StopIteration, match="ends"):  # no corpus is left out because of it
        quiet(build, one, [9, 0, 0], config(one, ([A, C], None)))


@linux
def test_60_corpora_build_and_train_with_100_open_files(one, tmp_path):
    """Each has 3,000 documents; the soft limit is raised.  Upstream ends with [Errno 24]."""
    mk(one, tmp_path / "p", [[1] * 3] * 3000)
    prefixes = [f"{tmp_path}/{'./' * number}p" for number in range(60)]  # each is opened by itself

    def build_and_read():
        resource = importlib.import_module("resource")
        os.closerange(3, 10_000)  # what is open already, wherever its numbers are
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 100))
        for _ in range(2):  # the second finds a cache
            train = build(one, [600, 0, 0], config(one, (prefixes, [1] * 60)))[0]
            assert len(batch_of(train, range(600))["tokens"]) == 600
            del train
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (100, 100)

    assert in_child(build_and_read) == 0


# ==============================================================================
# 8. Samplers
# ==============================================================================
# What a state holds besides the position is tested in section 10.

SHUFFLED = ["unsharded", "sharded"]


def rounds_of_turn(kind, total, micro, ranks, seed, turn, done):
    """Return [[rank 0's batch, rank 1's batch, ...] of each whole round] after `done` samples."""
    generator = torch.Generator().manual_seed(seed + turn)
    if kind == "single":
        order = torch.arange(total)
    elif kind == "unsharded":
        order = torch.randperm(total // micro * micro, generator=generator)
    else:
        of_rank = total // (micro * ranks) * micro
        order = torch.randperm(of_rank, generator=generator)[:, None]
        order = order + torch.arange(ranks) * of_rank
    rounds = []
    for part in order.flatten()[done:].split(micro * ranks):
        if len(part) == micro * ranks:  # a short one is left out
            dealt = part.view(ranks, micro) if kind == "single" else part.view(micro, ranks).T
            rounds.append(dealt.tolist())
    return rounds


def sampler_of(mm, kind, *sizes, seed=0, drop_last=True):
    """sizes: samples in all, consumed samples, micro-batch size, rank, number of ranks."""
    if kind == "single":
        return mm.MegatronPretrainingSampler(*sizes, drop_last)
    if kind == "full_validation":
        total, consumed, _, *place = sizes
        return mm.MegatronFullValidationSampler(total, *place, consumed_samples=consumed)
    return mm.MegatronPretrainingRandomSampler(None, *sizes, kind == "sharded", seed=seed)


@pytest.mark.parametrize("kind", ["single", *SHUFFLED])
def test_an_order_is_dealt_round_by_round(one, kind):
    """It continues from any position, and through the passes that follow."""
    for rng in cases(100):
        micro, ranks = rng.integers(1, 5, 2).tolist()
        per_round = micro * ranks
        total = per_round + int(rng.integers(50))
        seed, turn = rng.integers([100, 3]).tolist()
        consumed = done = int(rng.integers(total + 1))
        if kind != "single":
            done = int(rng.integers(total // per_round)) * per_round
            consumed = turn * (total - total % per_round) + done
        sizes = kind, total, consumed, micro
        all_ranks = [sampler_of(one, *sizes, r, ranks, seed=seed) for r in range(ranks)]
        assert len(all_ranks[0]) == total // per_round, "that of a whole turn"
        assert all_ranks[0].micro_batch_times_data_parallel_size == per_round
        for later in range(3):
            wanted = rounds_of_turn(kind, total, micro, ranks, seed, turn + later, done)
            found = [list(batches) for batches in zip(*all_ranks, strict=True)]
            assert found == wanted, (total, consumed, micro, ranks, later)
            done = 0


def test_a_last_short_round_is_shared_out(one):
    """All ranks get equally many full batches, padded with None; full validation does so, too."""
    for rng in cases(100):
        total, micro, ranks = rng.integers(1, [60, 5, 5]).tolist()
        consumed = int(rng.integers(total + 1))
        kind = "full_validation" if micro == 1 else "single"
        sizes = kind, total, consumed, micro
        all_ranks = [sampler_of(one, *sizes, r, ranks, drop_last=False) for r in range(ranks)]
        rounds = list(zip(*all_ranks, strict=True))
        assert len(rounds) == math.ceil((total - consumed) / (micro * ranks))
        assert len(all_ranks[0]) == math.ceil(total / (micro * ranks)), "that of a whole turn"
        found = []
        for batches in rounds:
            samples = [[k for k in batch if k is not None] for batch in batches]
            counts = [len(part) for part in samples]
            assert [len(batch) for batch in batches] == [micro] * ranks
            assert max(counts) - min(counts) <= 1
            found += itertools.chain(*samples)
        assert found == list(range(consumed, total))


def test_what_samplers_and_loaders_refuse(one):
    """Numbers are looked at when these are made, and not at the first batch."""
    too_far = "the dataset has 8 samples, but the run is at sample 9"
    for kind, sizes, words in (  # see sampler_of
        ("single", (0, 0, 1, 0, 1), "total_samples: expected .* at least 1, got 0"),
        ("single", (8, 0, 0, 0, 1), "micro_batch_size"),
        ("single", (8, 0, 1, 0, 0), "data_parallel_size"),
        ("single", (8, 9, 1, 0, 1), f"consumed_samples: {too_far}; request as many .* saved run"),
        ("single", (8, -1, 1, 0, 1), "consumed_samples: expected .* at least 0, got -1"),
        ("single", (8, 0, 1, 2, 2), "data_parallel_rank: expected .* from 0 to 1, got 2"),
        ("full_validation", (8, 0, 1, -1, 2), "data_parallel_rank"),
        ("sharded", (3, 0, 2, 0, 2), "total_samples: expected at least 4 .* got 3"),
        ("unsharded", (64, 24, 16, 0, 2), "consumed_samples: expected a multiple of 32 .* got 24"),
    ):
        raises(ValueError, f"^{words}", sampler_of, one, kind, *sizes)
    good = (8, 0, 1, 0, 1)
    for place in range(5):
        sizes = [*good[:place], good[place] + 0.5, *good[place + 1 :]]
        raises(TypeError, None, sampler_of, one, "single", *sizes)
    for seed in (1.5, -1, 2**63, "x", None, torch.tensor(1.5)):
        with pytest.raises(ValueError, match=f"seed: .* from 0 to {2**63 - 1}, got"):
            sampler_of(one, "sharded", *good, seed=seed)
        raises(ValueError, "seed", loader_of, one, Numbers(8), dataloader_type="cyclic", seed=seed)
    for seed in (2**63 - 1, np.int64(5), torch.tensor(5)):
        sampler = sampler_of(one, "unsharded", 8, 16, 1, 0, 1, seed=seed)
        assert type(sampler.seed) is int and len(list(sampler)) == 8
    for number in (-1, 1.5, "2"):
        raises(ValueError, "num_workers: .*least 0", loader_of, one, Numbers(8), num_workers=number)


@pytest.mark.parametrize("kind", [np.uint8, np.uint32, torch.tensor])
def test_a_layout_may_have_numbers_of_any_integer_type(one, kind):
    """Upstream's, and small integers of numpy, wrap in products and sums."""
    numbers = [200, 8, 2, 1, 2]
    for order in ("single", "full_validation", *SHUFFLED):
        found = list(sampler_of(one, order, *map(kind, numbers)))
        assert found == list(sampler_of(one, order, *numbers)), order
    assert one.ParallelGroups.rank_lists("dp", data=kind(3), tensor=kind(100))[99] == [99, 199, 299]
    row = {"tokens": torch.arange(1024)[None]}
    part = one.get_batch_on_this_cp_rank(row, kind(1), kind(128))["tokens"]
    assert part.tolist() == [[4, 5, 6, 7, 1016, 1017, 1018, 1019]]
    ramp = one.NumMicroBatches(kind(240), kind(16), kind(5), (kind(80), kind(80), 100))
    ramp.update(kind(60))
    assert (ramp.get(), ramp.get_current_global_batch_size()) == (2, 160)


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
    if kind == "single":
        return {"dataloader_type": "single", "drop_last": False}
    return {"dataloader_type": "cyclic", "data_sharding": np.bool_(kind == "sharded")}


def refusal(words):
    """The ValueError that is wanted; of None: that there is none."""
    return contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=words)


def loader_of(mm, dataset, consumed=0, **fields):
    """A loader; by default of one rank, and of batches of 4 samples."""
    return mm.build_pretraining_data_loader(dataset, consumed, **{"micro_batch_size": 4} | fields)


def test_a_run_continues_if_its_order_is_the_same(one):
    """It reads what a job reads that begins there.  Upstream continues with different samples."""

    def loader(total, layout, consumed=0):
        kind, micro, ranks = layout
        fields = fields_of(kind) | {"micro_batch_size": micro, "seed": 3}
        fields |= {"data_parallel_rank": ranks - 1, "data_parallel_size": ranks}
        return loader_of(one, Numbers(total), consumed, **fields)

    for total, consumed, before, after, refused in (  # the layouts: order, micro-batch size, ranks
        (65, 40, ("single", 2, 4), ("single", 3, 3), None),
        (67, 24, ("unsharded", 4, 2), ("unsharded", 8, 3), None),
        (64, 64, ("sharded", 2, 4), ("sharded", 4, 4), None),
        (64, 8, ("unsharded", 4, 1), ("sharded", 4, 1), "data_sharding"),
        (64, 8, ("single", 4, 1), ("unsharded", 4, 1), "kind"),
        (64, 8, ("sharded", 4, 1), ("sharded", 2, 2), "data_parallel_size"),
        (67, 8, ("unsharded", 4, 1), ("unsharded", 2, 1), "samples that are shuffled"),
        (20, 40, ("unsharded", 4, 1), ("unsharded", 4, 2), "done in the pass"),
        (64, 8, ("unsharded", 4, 1), ("unsharded", 4, 4), "consumed_samples: .*multiple of 16 "),
    ):
        resumed = loader(total, after)
        with refusal(refused):
            resumed.load_state_dict(loader(total, before, consumed).state_dict())
            same_batches(resumed, loader(total, after, consumed))


# ==============================================================================
# 9. Parallel batches
# ==============================================================================


def test_groups_of_one_process_and_what_cannot_be(one, monkeypatch):
    """A rank's number is tp + 2 cp + 4 dp + 12 pp in the first job here."""
    groups = one.ParallelGroups()
    assert groups.rank_lists("dp", tensor=2, context=2, data=3, pipeline=2)[0] == [0, 4, 8]
    assert groups.rank_lists("dp", data=2) == groups.rank_lists("tp", tensor=2) == [[0, 1]]
    for kind in ("tp", "dp-cp", "cp-pp"):  # any kind has a size, though not a process group
        assert (groups.rank(kind), groups.size(kind)) == (0, 1)
    assert groups.group("tp") is None
    raises(ValueError, "tp-ep", groups.rank_lists, "tp-ep")
    for tensor in (0, 2):
        raises(ValueError, f"tensor {tensor}", one.ParallelGroups, tensor=tensor)
    monkeypatch.setenv("WORLD_SIZE", "4")  # every rank would be rank 0 of one
    raises(ValueError, "WORLD_SIZE is 4", one.ParallelGroups)


def test_batches_of_a_job_with_nccl_travel_over_gloo_to_the_gpu(one, group, monkeypatch):
    with counted("new_subgroups_by_enumeration") as new:
        one.ParallelGroups()
    assert [call.kwargs["backend"] for call in new.call_args_list] == [*7 * [None], "gloo"]
    assert one._device_of_group() == torch.device("cpu")
    both = "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(torch.distributed, "get_backend_config", mock.Mock(return_value=both))
    assert one._device_of_group() == torch.device("cuda")


# -- A batch that one process reads for itself -------------------------------------------------

FIVE = ["tokens", "labels", "loss_mask", "attention_mask", "position_ids"]
ROWS = 2
LENGTH = 16
SHAPE = {"micro_batch_size": ROWS, "sequence_length": LENGTH}
WITH_MASK = {"create_attention_mask": True}
PACKED = {"packed": True}


def hand_made_batch(rng, rows=ROWS, length=LENGTH):
    """Make a batch of any positions and mask, but last tokens may not attend to first ones."""
    ids = torch.from_numpy(rng.integers(0, 50, (rows, length + 1)))
    mask = torch.from_numpy(rng.random((rows, 1, length, length)) < 0.5)
    mask[:, 0, -1, [0, -1]] = True
    return {
        "tokens": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "loss_mask": torch.ones(rows, length),
        "attention_mask": mask,
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


def needs_of_stage(groups, create_attention_mask=False, mtp=False, packed=False):
    """The keys of what the pipeline stage of this rank needs."""
    keys = []
    if groups.is_first_stage or mtp:
        keys += ["tokens", "position_ids"]
    if groups.is_last_stage or mtp:
        keys += ["labels", "loss_mask"]
    if packed:
        keys += ["cu_seqlens", "max_seqlen"]
    if create_attention_mask and (groups.is_first_stage or groups.is_last_stage):
        keys.append("attention_mask")
    return keys


def same_batch(found, wanted, keys, note=""):
    """Equal tensors under these keys, None under the others of FIVE."""
    assert list(found)[:5] == FIVE, note
    assert {key for key, value in found.items() if value is not None} == set(keys), note
    for key in keys:
        same(found[key], wanted[key], (note, key))


@pytest.mark.parametrize("first, last", [*itertools.product([True, False], repeat=2)])
def test_each_stage_reads_what_it_needs(one, monkeypatch, first, last):
    """A stage that needs nothing reads nothing.  Upstream's middle stages get no cu_seqlens."""
    monkeypatch.setattr(one.ParallelGroups, "is_first_stage", first)
    monkeypatch.setattr(one.ParallelGroups, "is_last_stage", last)
    groups = one.ParallelGroups()
    wanted = packed_batch(np.random.default_rng(4), [[16], [3, 9, 4]])
    packed = wanted | {"tokens": wanted["tokens"].short()}
    plain = packed | {"cu_seqlens": None}
    for options in ({}, WITH_MASK, {"mtp": True}, PACKED, PACKED | WITH_MASK | {"mtp": True}):
        source = iter([packed if "packed" in options else plain])
        keys = needs_of_stage(groups, **options)
        same_batch(one.get_batch(source, groups, **SHAPE, **options), wanted, keys, options)
        assert (next(source, None) is None) == bool(keys), options
    found = one.get_batch(iter([plain]), groups, **SHAPE, device="meta")  # which every machine has
    assert {found[key].device.type for key in needs_of_stage(groups)} <= {"meta"}


def test_a_batch_that_does_not_fit_is_refused(one, tmp_path):
    """So is a batch whose mask keeps documents apart, if no mask is requested."""
    plain = hand_made_batch(np.random.default_rng(3))
    packed = packed_batch(np.random.default_rng(3), [[16], [4, 12]])
    prefix = mk(one, tmp_path / "p", [[0, *39 * [1], 0]])  # only the first token is apart
    fields = WITH_MASK | {"reset_attention_mask": True, "sequence_length": LENGTH}
    apart = batch_of(gpt(one, prefix, **fields), range(ROWS))
    for batch, options, word in (
        (plain | {"tokens": torch.zeros(1, 16)}, {}, "tokens.*shape .* got .*sequence_length"),
        (plain | {"attention_mask": None}, WITH_MASK, "attention_mask.*got None"),
        (plain | {"labels": plain["loss_mask"]}, {}, "labels.*torch.int64, got torch.float"),
        (plain, PACKED, "packed=True, but .* has no cu_seqlens; pass packed=False"),
        (packed, {}, "packed=False, but .* has cu_seqlens; pass packed=True"),
        (apart, {}, "keeps documents apart.*create_attention_mask=True, or batches without"),
    ):
        with pytest.raises(ValueError, match=word):
            one.get_batch(iter([batch]), one.ParallelGroups(), **SHAPE, **options)


def test_documents_are_cut_one_by_one_or_as_a_row(one):
    """The part is a new batch; the default device has no effect."""
    documents = [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]  # what each of two ranks keeps
    whole = [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    batch = packed_batch(np.random.default_rng(5), [[4, 8], [12]])
    with mock.patch.object(one, "get_batch_on_this_cp_rank") as cut:
        how = {"use_per_sequence_balancing": True}
        options = SHAPE | {"sequence_length": 12} | WITH_MASK | PACKED | how
        one.get_batch(iter([batch]), one.ParallelGroups(), **options)
    assert cut.call_args.kwargs == how
    batch["cu_seqlens"] = batch["cu_seqlens"][:, :12]  # as many entries as a row has tokens
    batch["scores"] = torch.arange(2 * 12 * 3).view(2, 12, 3)  # of the user, with the axis
    others = {"dataset_id": torch.arange(2), "sizes": torch.zeros(2, 3), "nothing": None}
    batch = others | batch
    before = copy.deepcopy(batch)
    for rank, per_sequence, device in itertools.product((0, 1), (False, True), ("cpu", "meta")):
        places = [whole[rank] if per_sequence else documents[rank], whole[rank]]
        with torch.device(device):
            how = {"use_per_sequence_balancing": per_sequence}
            part = one.get_batch_on_this_cp_rank(batch, rank, 2, **how)
        for row in range(2):
            for key in ("tokens", "labels", "loss_mask", "position_ids", "scores"):
                same(part[key][row], batch[key][row, places[row]], (key, rank))
            same(part["attention_mask"][row], batch["attention_mask"][row][:, places[row]])
        for key in ("cu_seqlens", "max_seqlen", *others):
            assert part[key] is batch[key]
    same_samples(batch, before)
    of_keys = {"attention_mask": torch.zeros(2, 1, 1, 12, dtype=torch.bool)}  # for all queries
    part = one.get_batch_on_this_cp_rank(batch | of_keys, 0, 2)
    assert part["attention_mask"] is of_keys["attention_mask"]


def test_what_cannot_be_cut_is_refused(one):
    """A middle stage knows a row from cu_seqlens alone; under other names, nothing is a row."""
    rest = 13 * [16]  # cu_seqlens has an entry more than a row has tokens
    for cu_seqlens, by_row, words in (
        ([[0, 4, *9 * [10]]], True, "rows have 10 tokens.* multiple of 4 .*cp_size.*; change"),
        ([[0, 8, 16, 16, *rest], [0, 4, 10, 16, *rest]], False, "1 of row 1 has 6 .*per_sequence"),
        ([[-8, 8, 8, 16, *rest]], False, "0 of row 0 has -8 tokens"),  # before the row
        ([[0, 8, 24, 24, *rest]], False, "2 of row 0 has -8 tokens"),  # behind it
        ([[0, 4, *7 * [8]]], False, None),
    ):
        part = dict.fromkeys(FIVE) | {"cu_seqlens": torch.tensor(cu_seqlens)}
        for tokens in (None, torch.zeros(len(cu_seqlens), len(cu_seqlens[0]) - 1)):
            with refusal(words):
                batch = part | {"tokens": tokens}
                one.get_batch_on_this_cp_rank(batch, 1, 2, use_per_sequence_balancing=by_row)
    names = {"input_ids": torch.zeros(2, 8), "dataset_id": torch.zeros(2)}
    for batch, rank, words in (
        ({"tokens": torch.zeros(2, 8)}, 2, "cp_rank"),
        ({"tokens": torch.zeros(8)}, 1, r"tokens'\]: expected 8 tokens along dim 1.*\(8,\)"),
        ({"tokens": torch.zeros(1, 8), "labels": torch.zeros(1, 9)}, 1, "labels.*ed 8 .*same len"),
        ({"tokens": torch.zeros(2, 8), "cu_seqlens": torch.zeros(1, 2)}, 1, "has 2 rows, .* 1;"),
        (names, 1, r"of tokens, labels, .*position_ids .*: \['input_ids'\]\); rename"),
        (dict.fromkeys(FIVE) | names | {3: torch.zeros(1)}, 0, r"keys: \[3, 'input_ids'\]"),
        ({"tokens": torch.zeros(2, 8), "loss_mask": np.ones((2, 8))}, 1, "mask.*tensor, got ndarr"),
    ):
        raises(ValueError, words, one.get_batch_on_this_cp_rank, batch, rank, 2)
        if rank < 2:
            assert one.get_batch_on_this_cp_rank(batch, 0, 1) == batch  # which cuts nothing
    for nothing in ({}, dict.fromkeys(FIVE), {"dataset_id": 1, "max_seqlen": 8}):
        assert one.get_batch_on_this_cp_rank(nothing, 1, 2) == nothing


# -- Jobs of real processes --------------------------------------------------------------------
# A scenario is a function of a Job, and perhaps of an argument; it runs on every rank of the job,
# and what it asserts must hold on each.

LAYOUTS = {  # {ranks: the sizes of each layout}
    2: [{}, {"tensor": 2}, {"context": 2}, {"pipeline": 2}],
    4: [{"tensor": 2}, {"tensor": 2, "context": 2}, {"tensor": 2, "pipeline": 2}, {"pipeline": 4}],
}
two_or_four_ranks = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])


@dataclasses.dataclass
class Job:
    """What a scenario gets on each rank."""

    mm: types.ModuleType
    rank: int
    world: int
    folder: pathlib.Path

    def share(self, tensors):
        """This rank's part of each tensor."""
        return [tensor.chunk(self.world)[self.rank] for tensor in tensors]


def run_on_ranks(world, folder, calls):
    """Make the calls, (scenario, arguments), on every rank; two cp ranks can cut b's documents."""
    one = copy_of_module("python")
    rng = np.random.default_rng(11)
    for name, step in (("a", 1), ("b", 4)):
        lengths = step * rng.integers(1, 14, 30)
        mk(one, folder / name, [np.append(rng.integers(1, 99, n - 1), 0) for n in lengths])
    torch.multiprocessing.start_processes(  # if one fails, it ends the others
        run_on_rank, (world, folder, list(calls)), world, start_method="forkserver"
    )


def run_on_rank(rank, world, folder, calls):
    os.fsync = do_not_wait
    place = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world}
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60), **place)
    job = Job(copy_of_module("python"), rank, world, folder)
    for scenario, *arguments in calls:
        scenario(job, *arguments)
    torch.distributed.destroy_process_group()


def counted(collective):
    """Count how often this rank starts a collective in a with block."""
    function = getattr(torch.distributed, collective)
    return mock.patch.object(torch.distributed, collective, wraps=function)


RESETS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
DOCUMENTS = {"inter_document_masking": True}


def each_rank_gets_its_part_of_a_batch(job, layout):
    """There is one broadcast; if the reader fails, its group does, and the next batch arrives."""
    groups = job.mm.ParallelGroups(**layout)
    data = job.world // math.prod(layout.values())
    assert groups.sizes == {"tensor": 1, "context": 1, "data": data, "pipeline": 1} | layout
    for kind in ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp-pp"):
        lists = job.mm.ParallelGroups.rank_lists(kind, **groups.sizes)  # Parity compares these
        [mine] = [ranks for ranks in lists if job.rank in ranks]
        assert torch.distributed.get_process_group_ranks(groups.group(kind)) == mine
        assert (groups.rank(kind), groups.size(kind)) == (mine.index(job.rank), len(mine))
    first = ROWS * groups.rank("dp")
    words = "^panicked$"
    if groups.rank("tp") > 0:
        words = rf"^rank {groups.ranks('tp')[0]}: panicked \(Panic\)$"
    for fields, options in ((WITH_MASK | RESETS, WITH_MASK), (DOCUMENTS, PACKED)):
        train = quiet(gpt, job.mm, str(job.folder / "b"), sequence_length=LENGTH, **fields)
        whole = batch_of(train, range(first, first + ROWS))
        keys = needs_of_stage(groups, **options)
        source = None
        if keys and groups.rank("tp") == 0:
            source = mock.MagicMock()  # an iterator that goes on after an error
            source.__next__ = mock.Mock(side_effect=[Panic("panicked"), whole])
        if keys:
            raises(BaseException, words, job.mm.get_batch, source, groups, **SHAPE, **options)
        if "tokens" in keys and groups.size("tp") > 1:
            sparse = iter([whole | {"tokens": whole["tokens"].to_sparse()}])  # it cannot be copied
            raises(RuntimeError, "copy_", job.mm.get_batch, sparse, groups, **SHAPE, **options)
        with counted("broadcast") as broadcast:
            found = job.mm.get_batch(source, groups, **SHAPE, **options)
        assert broadcast.call_count == (groups.size("tp") > 1 and len(keys) > 0)
        wanted = job.mm.get_batch_on_this_cp_rank(whole, groups.rank("cp"), groups.size("cp"))
        same_batch(found, wanted, keys, options)


@two_or_four_ranks
def test_ranks_receive_their_parts_of_a_batch(tmp_path, world):
    calls = itertools.product([each_rank_gets_its_part_of_a_batch], LAYOUTS[world])
    run_on_ranks(world, tmp_path, calls)


# ==============================================================================
# 10. The loader and its state
# ==============================================================================


def dataset_of(mm, folder, kind):
    """A dataset of 23 samples."""
    if kind == "numbers":
        return Numbers(23)
    prefix = mk(mm, folder / "p", [np.arange(n) for n in range(1, 20)], np.uint16)
    dataset = gpt(mm, prefix, 23, mmap_bin_files=kind != "not mapped")
    if not kind.startswith("blend"):
        return dataset
    cfg = dataset.config
    if kind == "blend of another config":
        cfg = copy.copy(cfg)
    return mm.BlendedDataset([dataset, dataset], [1, 2], 23, cfg)


def same_batches(found, wanted, note=""):
    """Equal batches (or samples), their keys in the same order."""
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        same_samples(ours, theirs, (note, number))


def states_of_generators():
    """Those of the global generators of torch, numpy and Python."""
    return [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]


def wait_for_the_end_of_threads(others):
    """Wait for all threads but these."""
    for thread in set(threading.enumerate()) - others:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "module, kind, order, by_threads",
    [
        ("c", "plain", "unsharded", True),
        ("c", "not mapped", "sharded", True),
        ("c", "blend", "single", True),
        ("c", "blend of another config", "single", False),
        ("one", "plain", "single", False),
        ("one", "numbers", "sharded", False),
    ],
)
def test_a_loader_yields_the_plain_loaders(request, tmp_path, module, kind, order, by_threads):
    """Threads of C or processes make them; the default device and generators have no effect."""
    mm = request.getfixturevalue(module)
    others = set(threading.enumerate())
    dataset = dataset_of(mm, tmp_path, kind)
    fields = fields_of(order)
    wanted = list(mm.batches_of(dataset, sampler_of(mm, order, 23, 0, 4, 0, 1, drop_last=False)))
    generators = states_of_generators()
    with torch.device("meta"):
        for num_workers in (0, 1):
            loader = loader_of(mm, dataset, num_workers=num_workers, **fields)
            assert loader.makes_own_batches == by_threads
            assert loader.num_workers == (0 if by_threads else num_workers)
            iterator = iter(loader)
            found = [next(iterator), next(iterator)]
            assert torch.empty(1).device.type == "meta"
            del iterator
            state = loader.state_dict()
            assert state["consumed_samples"] == 8
            for resumed in (loader_of(mm, dataset, **fields), loader):
                resumed.load_state_dict(state)
                same_batches(found + list(resumed), wanted, num_workers)
                assert resumed.state_dict()["consumed_samples"] == min(23, 4 * len(wanted))
    assert states_of_generators() == generators
    wait_for_the_end_of_threads(others)


def test_batches_are_pinned_where_there_is_a_gpu(c, tmp_path, monkeypatch):
    """Nothing can be pinned here: a mock returns 5 for each tensor."""
    monkeypatch.setattr(torch.cuda, "is_available", yes)
    monkeypatch.setattr(torch.Tensor, "pin_memory", mock.Mock(return_value=5))
    loader = loader_of(c, dataset_of(c, tmp_path, "plain"))
    assert set(next(iter(loader)).values()) == {5}


def test_dataloader_type_selects_the_sampler(one, monkeypatch):
    """A loader without samples is None; in a job of several processes it must be told its rank."""
    shuffled = loader_of(one, range(8), dataloader_type="cyclic", micro_batch_size=8)
    assert next(iter(shuffled)).tolist() == [4, 0, 7, 3, 2, 5, 1, 6]  # the order of seed 0
    whole = loader_of(one, range(9), 2, data_parallel_size=2, full_validation=True)
    assert [batch.tolist() for batch in whole] == [[2], [4], [6], [8]]  # none is left out
    own = type("Own", (torch.utils.data.Subset,), {"__getitems__": mock.Mock(return_value=[3, 1])})
    part = torch.utils.data.Subset(own(range(9), [2, 4]), [0, 1])
    assert next(iter(loader_of(one, part, micro_batch_size=2))).tolist() == [3, 1]
    plain = type("Plain", (Numbers,), {"__getitems__": None})(9)
    some = torch.utils.data.Subset(torch.utils.data.Subset(plain, range(4, 9)), [1, 2, 3])
    ranks = {"data_parallel_rank": 1, "data_parallel_size": 2}
    padded = loader_of(one, some, full_validation=True, **ranks)
    assert [batch["k"].tolist() for batch in padded] == [[6], [-1]]
    sampler = one.MegatronPretrainingSampler(8, 0, 4, 0, 1)
    loader = one.PretrainingDataLoader(Numbers(8), sampler, collate_fn=len)
    assert (list(loader), loader.num_workers) == ([4, 4], 0)
    raises(ValueError, "dataloader_type", loader_of, one, Numbers(9), dataloader_type="odd")
    raises(ValueError, "got 2 datasets; build one loader", loader_of, one, [Numbers(9)] * 2)
    with pytest.raises(ValueError, match="in_order=False"):
        one.PretrainingDataLoader(Numbers(8), sampler, in_order=False)
    with pytest.warns(UserWarning, match="no batch: .* 6 samples, .* 16; request"):
        assert list(loader_of(one, Numbers(6), micro_batch_size=16)) == []
    assert len(list(loader_of(one, Numbers(8), 1))) == 1, "the rounds begin at sample 1"
    ending = loader_of(one, Numbers(9))
    with mock.patch.object(Numbers, "__getitem__", side_effect=[1, 2, 3, 4, StopIteration]):
        batches = iter(ending)
        next(batches)
        raises(RuntimeError, "at sample 4, .* at sample 8; .* StopIteration", next, batches)

    monkeypatch.setenv("WORLD_SIZE", "2")
    rank, size = {"data_parallel_rank": 0}, {"data_parallel_size": 1}
    for given in (rank, size):
        raises(ValueError, "2 processes need data_parallel_rank", loader_of, one, [1], **given)
    assert len(loader_of(one, Numbers(9), **rank, **size)) == 2
    assert loader_of(one, None) is loader_of(one, Numbers(0)) is None
    assert loader_of(one, given, dataloader_type="external") is given
    with mock.patch.multiple(one, _is_distributed=yes):  # which counts, where it is initialized
        with mock.patch.object(torch.distributed, "get_world_size", return_value=1):
            assert len(loader_of(one, Numbers(9))) == 2


@pytest.mark.parametrize("num_workers", [0, 3])
def test_batches_are_made_only_a_few_ahead(c, tmp_path, num_workers, monkeypatch):
    """Without workers, none: by the thread that asks for it.  An error comes at its batch."""
    dataset = dataset_of(c, tmp_path, "plain")
    make = c._make_batch
    makers = []

    def make_and_note(dataset, indices):
        makers.append(threading.current_thread())
        return make(dataset, indices)

    monkeypatch.setattr(c, "_make_batch", make_and_note)
    ahead = num_workers + 1 if num_workers else 0
    sampler = c.MegatronPretrainingSampler(len(dataset) + 3, 0, 1, 0, 1)
    loader = c.PretrainingDataLoader(dataset, sampler, num_workers)
    number = 0
    with pytest.raises(IndexError, match=f"samples of {dataset.dataset_path}"):
        for number, _ in enumerate(loader, 1):
            assert number <= len(makers) <= number + ahead
    assert number == loader.state_dict()["consumed_samples"] == len(dataset)
    assert (threading.current_thread() in makers) == (num_workers == 0)


@pytest.mark.parametrize("is_error", [False, True])
def test_batches_that_nobody_waits_for_are_cancelled(c, tmp_path, monkeypatch, is_error):
    """Once the iterator is gone, or has raised, the two threads end the batches that they make."""
    may_go_on = threading.Event()
    begun = []

    def make_slowly(dataset, indices):
        begun.append(indices[0])
        if is_error and indices[0] == 4:
            raise OSError("the storage")
        assert indices[0] == 0 or may_go_on.wait(20)

    monkeypatch.setattr(c, "_make_batch", make_slowly)
    monkeypatch.setattr(torch.cuda, "is_available", mock.Mock(return_value=False))
    others = set(threading.enumerate())
    batches = iter(loader_of(c, dataset_of(c, tmp_path, "plain"), num_workers=2))
    next(batches)
    while len(begun) < 3 + is_error:  # of four that are ahead
        time.sleep(0.001)
    if is_error:
        raises(OSError, "the storage", next, batches)
    del batches
    may_go_on.set()
    wait_for_the_end_of_threads(others)
    assert sorted(begun) == ([0, 4, 8, 12] if is_error else [0, 4, 8])


# -- Several iterators -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["single", "whole rounds", *SHUFFLED])
def test_the_next_iterator_continues_from_a_state(one, kind):
    """The next one does; one that runs ends with an error; one that is left early is a warning."""
    fields = {} if kind == "whole rounds" else fields_of(kind)
    loader = loader_of(one, Numbers(23), **fields)
    whole = list(loader_of(one, Numbers(23), **fields))
    running = iter(loader)
    found = [next(running), next(running)]
    state = loader.state_dict()
    loader.load_state_dict(state)
    raises(RuntimeError, "load_state_dict", next, running)
    found += itertools.islice(loader, len(whole) - 2)
    same_batches(found, whole)  # zip() asked for no more, so the iterator was not left early
    assert heard(next, iter(loader))[1] == []
    for _ in range(2):  # loaded again: that is no iterator to be warned of
        loader.load_state_dict(state)
        assert heard(next, iter(loader))[1] == []
    if kind in SHUFFLED:  # the next one goes on there
        assert heard(next, iter(loader))[1] == []
    else:
        with pytest.warns(match="stopped at sample 12, .* at sample 0;.*load_state_dict"):
            next(iter(loader))
    assert heard(next, iter(loader))[1] == []  # it did not go on from a state


PASSES = {  # arguments of a loader of 23 samples, the end of its pass, arguments of smaller rounds
    "single": ({}, 20, {"micro_batch_size": 1}),
    "all samples": ({"drop_last": False}, 23, {"micro_batch_size": 1}),
    "full": ({"full_validation": True, "data_parallel_size": 4}, 23, {"data_parallel_size": 1}),
    "cyclic": ({"dataloader_type": "cyclic"}, 20, {}),
}


@pytest.mark.parametrize("kind", PASSES)
def test_a_state_at_the_end_of_a_pass(one, kind):
    """After the loop the next pass begins; at the last batch inside the loop, the rest is empty."""
    fields, end, smaller = PASSES[kind]
    is_cyclic = kind == "cyclic"

    def loader(n=23, **more):
        return loader_of(one, torch.utils.data.Subset(Numbers(99), range(n)), **fields | more)

    whole = loader()
    first = []
    states = []
    for batch in whole:
        first.append(batch["k"].tolist())
        states.append(whole.state_dict())
    after = whole.state_dict()
    second = [batch["k"].tolist() for batch in whole]  # in the same loader
    assert whole.state_dict()["consumed_samples"] == end * (1 + is_cyclic)
    assert {state["is_end_of_pass"] for state in states} == {0}
    assert (after["consumed_samples"], after["is_end_of_pass"]) == (end, int(not is_cyclic))
    rest = second if is_cyclic else []
    for state, wanted in ((states[1], first[2:]), (states[-1], rest), (after, second)):
        for strict in (True, False):
            resumed = loader()
            resumed.load_state_dict(state, strict=strict)
            assert (resumed.state_dict(), len(resumed)) == (state, len(whole))
            assert [batch["k"].tolist() for batch in resumed] == wanted
            assert resumed.state_dict()["is_end_of_pass"] == after["is_end_of_pass"]
            assert is_cyclic or [batch["k"].tolist() for batch in resumed] == first
    resumed = loader()
    resumed.load_state_dict(after)
    for number in range(2):  # left early
        found, messages = heard(next, iter(resumed))
        assert (found["k"].tolist(), messages) == (second[number * is_cyclic], [])
        assert resumed.state_dict()["is_end_of_pass"] == 0
    if is_cyclic:
        return
    assert resumed.state_dict()["consumed_samples"] == 4
    for n, more, begin in ((40, {}, end), (23, smaller, end % 23)):
        resumed = loader(n, **more)
        resumed.load_state_dict(after)
        assert resumed.state_dict() == after | {"is_end_of_pass": int(begin == 0)}
        assert next(iter(resumed))["k"].tolist()[0] == begin


def test_a_run_that_grows_continues_after_the_end_of_a_pass(one, tmp_path):
    """It grows by samples of a stable order or by a later phase; else the next pass begins."""
    make_corpora(one, tmp_path)
    prefix = str(tmp_path / "a")
    of_24 = loader_of_run(one, tmp_path, mix=[(24, U)])
    of_20 = loader_of(one, gpt(one, prefix, 20, stable_order=True))
    for before, after in (
        (of_24, loader_of_run(one, tmp_path, **TWO_PHASES)),
        (of_24, loader_of_run(one, tmp_path, mix=[(24, U)])),
        (of_20, loader_of(one, gpt(one, prefix, 400, stable_order=True))),
    ):
        end = 4 * len(list(before))
        state = before.state_dict()
        assert (state["consumed_samples"], state["is_end_of_pass"]) == (end, 1)
        after.load_state_dict(state)
        begin = end if len(after.dataset) > len(before.dataset) else 0
        assert after.state_dict() == state | {"is_end_of_pass": int(begin == 0)}
        wanted = [after.dataset[k] for k in range(begin, begin + 4)]
        same_samples(next(iter(after)), torch.utils.data.default_collate(wanted))


@pytest.mark.parametrize("kind", ["single", *SHUFFLED])
def test_a_state_is_of_the_newest_iterator(one, kind):
    """A pass in order starts at 0; a shuffled one continues, and counts the samples of all."""
    whole = list(loader_of(one, Numbers(64), **fields_of(kind)))
    loader = loader_of(one, Numbers(64), **fields_of(kind))
    start = 1 if kind in SHUFFLED else 0
    older = iter(loader)
    same_samples(next(older), whole[0])
    newest = iter(loader)
    same_samples(next(newest), whole[start])
    same_batches(older, whole[1:])
    assert loader.state_dict()["consumed_samples"] == 4 * (start + 1)
    same_batches(newest, whole[start + 1 :])
    same_batches(loader, loader_of(one, Numbers(64), 64 * start, **fields_of(kind)))


def test_with_persistent_workers_an_older_iterator_raises(one):
    """The workers are the newest's, and none of its batches is lost."""
    sampler = sampler_of(one, "single", 12, 0, 4, 0, 1)
    loader = one.PretrainingDataLoader(Numbers(12), sampler, 1, persistent_workers=True)
    older = iter(loader)
    next(older)
    newest = iter(loader)
    found = [next(newest)]
    raises(RuntimeError, "a newer iterator has begun", next, older)
    same_batches(found + list(newest), loader_of(one, Numbers(12)))


def test_samples_are_on_the_cpu_and_no_global_generator_is_drawn_from(mm, tmp_path):
    """With masks, of a blend, of chats; whatever the default device is, here one without values."""
    source = jsonl(tmp_path / "t", ["1 2 3 0 5 6 7 8 9"] * 12)
    chat = jsonl(tmp_path / "chat.jsonl", [ROW] * 12, "messages")
    generators = states_of_generators()
    found = {"cpu": [], "meta": []}
    for device, samples in found.items():
        with torch.device(device):
            pair = mm.preprocess(source, tmp_path / device, Tok(), append_eod=True)["text"]
            for cls, prefixes, fields in (
                (mm.GPTDataset, [pair], WITH_MASK | RESETS),
                (mm.GPTDataset, [pair, pair], DOCUMENTS),
                (mm.SFTDataset, [chat], {}),
            ):
                cfg = config(mm, (prefixes, None), tokenizer=ChatTokenizer(), **fields)
                dataset = build(mm, [12, 0, 0], cfg, cls)[0]
                samples += [dataset[k] for k in (0, 3, None)]
    assert states_of_generators() == generators
    same_batches(found["meta"], found["cpu"])


def draw(samples):
    """A batch of what is drawn in the process that makes it."""
    return [torch.rand(1).item(), np.random.rand(), random.random()]


def test_what_worker_processes_draw_depends_on_the_seed_the_rank_and_the_place(one):
    """Nothing else matters, nor does a state, unless a generator is given."""

    def drawn(consumed=0, rank=0, seed=1, state=None, **arguments):
        torch.manual_seed(seed)
        sampler = sampler_of(one, "single", 16, consumed, 2, rank, 2)
        loader = one.PretrainingDataLoader(Numbers(16), sampler, 1, collate_fn=draw, **arguments)
        if state is not None:
            loader.load_state_dict(state, strict=False)
        return next(iter(loader))

    others = [drawn(), drawn(4), drawn(rank=1), drawn(seed=2)]
    others.append(drawn(generator=torch.Generator().manual_seed(3)))
    for numbers in zip(*others, strict=True):
        assert len(set(numbers)) == 5
    assert drawn(state={"version": 7, "consumed_samples": 4, "past": "{}"}) == others[1]


# -- The state: what it holds ------------------------------------------------------------------


class Wrapped(Numbers):
    """A dataset that makes its samples of another's, if it has one; they may not be read here."""

    def __init__(self, dataset=None, **attributes):
        super().__init__(64)
        self.dataset = dataset
        vars(self).update(attributes)

    def __getitem__(self, k):
        pytest.fail("a file is opened by whoever reads first, and then workers share its place")


def load_state_of(before, after, consumed, words):
    """A loader loads the state of another one: of other data, or what differs is said."""
    before.consumed_samples = consumed
    if words is not None:
        words = f"^cannot resume: {words}.*strict=False.*stable_order=True"
    with refusal(words):
        after.load_state_dict(before.state_dict())
        assert after.consumed_samples == consumed


def test_the_state_of_a_blend_by_hand(one, tmp_path):
    """It holds nothing about corpora that gave no sample yet, here 1 and 3."""
    part = gpt(one, mk(one, tmp_path / "p", [[1] * 17, [2] * 9, [3] * 30]), 40)
    other = Bare(40, one.Split.train)
    phases = [(6, (1, 0, 1, 0)), (9, (1, 1, 1, 1))]
    blend = one.BlendedDataset([part, part, other, other], None, None, part.config, phases=phases)
    data = {
        "class": "BlendedDataset",
        "corpus 0": {
            "class": "GPTDataset",
            "name (not compared)": "p",
            "fingerprint": part.dataset.fingerprint(),
            "documents (split)": "range(0, 3)",
            "sequence_length": 8,
            "add_extra_token_to_sequence": True,
            "drop_last_partial_validation_sequence": True,
            "random_seed": 1234,
            "stable_order, or one epoch": False,
            "epochs": 6,
            "last epoch shuffled alone": False,
        },
        "corpus 2": {"class": "Bare", "name (not compared)": "bare"},
    }
    order = zlib.crc32(np.array([0, 2, 0, 2, 0, 2], "<i2"))
    data["which corpus gave which sample (weights, blend_phases)"] = order
    history = json.dumps({"sampler": {"kind of the sampler": "single"}, "data": data})
    wanted = {"version": 8, "consumed_samples": 6, "is_end_of_pass": 0, "history": history}
    assert loader_of(one, blend, 6, micro_batch_size=2).state_dict() == wanted
    assert loader_of(one, blend).state_dict()["history"] == "{}", "nothing was consumed"


def test_no_sample_is_read_for_a_state_and_no_storage_is_asked(one):
    """The loader asks everything when it is made; a state is always equal to a new loader's."""
    part = Wrapped(Wrapped(), index_split=one.Split.train, unique_identifiers={})
    phases = [(12, (1, 2, 0)), (48, (1, 2, 1))]
    blend = one.BlendedDataset([part] * 3, None, None, config(one), phases=phases)
    data = torch.utils.data.Subset(blend, range(60))
    part.fingerprint = part.dataset.fingerprint = mock.Mock(return_value=5)
    states = [loader_of(one, data, n).state_dict() for n in (8, 20, 12, 40, 4)]
    loader = loader_of(one, data)
    part.fingerprint.side_effect = OSError("the storage does not answer")
    with mock.patch.object(one, "_samples_per_dataset", wraps=one._samples_per_dataset) as counts:
        for state in states:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
    read = [len(call.args[0]) for call in counts.call_args_list]
    assert read == [8, 0, 12, 0, 12, 0, 28, 0, 4, 0]
    assert ["corpus 2" in state["history"] for state in states] == [False, True, False, True, False]


# -- The state: of two runs --------------------------------------------------------------------


def loader_of_run(
    mm, folder, corpora="ab", mix=((40, (1, 2)),), samples=None, which=0, order="single", **fields
):
    """A loader of corpora that are mixed by phases, or laid end to end; or of some samples."""
    prefixes = [str(folder / name) for name in corpora]
    if mix is not None:
        mix = [(count, weights[: len(corpora)]) for count, weights in mix]
    fields = {"stable_order": True, "blend_phases": mix} | fields
    sizes = [0, 0, 0]
    sizes[which] = None
    data = build(mm, sizes, config(mm, (prefixes, None), **fields))[which]
    if samples is not None:
        data = torch.utils.data.Subset(data, samples)
    kind, _, seed = order.partition(" ")
    return loader_of(mm, data, **fields_of(kind), seed=int(seed or 0))


U = (1, 2, 1)  # weights of phases, as V, of as many corpora as there are
V = (2, 1, 1)
TWO_PHASES = {"mix": [(24, U), (24, V)]}
UNSTABLE = {"stable_order": False}
OTHER_MIX = r"which corpus gave which sample \(weights, blend_phases\) differs.  To change the "
OTHER_MIX += "weights from here on, use blend_phases: first the earlier weights, for the samples "
OTHER_MIX += "consumed so far, and then the new ones.  To resume exactly"
RUNS = [  # a run; what is another in the next one; what is said of it, or None: it fits
    ({}, {"corpora": ["copies/of a", "copies/b"]}, None),
    ({}, {"corpora": "abc", "mix": [(40, (1, 2, 0)), (9, (1, 1, 1))]}, None),
    (TWO_PHASES, {"mix": [(48, (1, 0))]}, OTHER_MIX),  # and nothing is known of b
    (UNSTABLE | {"mix": [(400, U)]}, {"mix": [(40, V)]}, OTHER_MIX),  # epochs, too
    ({}, {"corpora": "a", "mix": None}, "class was BlendedDataset in .*, and is GPTDataset."),
    ({}, {"corpora": ["other tokens/a", "b"]}, r"bin_ends_crc32 of .*corpus 0 \(a\) differs."),
    ({}, {"corpora": "ba"}, r"bin_size of fingerprint of corpus 0 \(a, then b\) was "),
    ({}, {"split": "8,2,0"}, r"documents \(split\) of corpus 0 \(a\) was range\(0, 40"),
    (UNSTABLE, {"mix": [(400, U)]}, "stable_order, or one epoch of .* True .* False"),
    ({"samples": range(0, 40, 2)}, {"samples": range(8, 40)}, "indices differs."),
]


def make_corpora(mm, folder):
    """Make a, b and c; the same as copies; and some of the same lengths with other tokens."""
    for number, name in enumerate("abc"):
        rng = np.random.default_rng(number)
        docs = [rng.integers(0, 2**30, length) for length in rng.integers(0, 30, 40)]
        for place, plus in (("", 0), ("copies/", 0), ("copies/of ", 0), ("other tokens/", 1)):
            mk(mm, folder / f"{place}{name}", [doc + plus for doc in docs])


def consumed_texts(loader, consumed):
    """Tokens and labels of each sample that a loader's job has consumed, in order."""
    numbers = itertools.chain.from_iterable(loader.batch_sampler)
    samples = [loader.dataset[k] for k in itertools.islice(numbers, consumed)]
    return [(sample["tokens"].tolist(), sample["labels"].tolist()) for sample in samples]


def test_a_state_fits_if_the_samples_are_equal(one, tmp_path):
    """If they are not, the error says what differs, and what to do."""
    make_corpora(one, tmp_path)
    for run, changes, words in RUNS:
        before = loader_of_run(one, tmp_path, **run)
        after = loader_of_run(one, tmp_path, **run | changes)
        n = min(40, len(before.dataset))
        assert (consumed_texts(before, n) == consumed_texts(after, n)) == (words is None), changes
        load_state_of(before, after, n, words)


SEVERAL_PHASES = [[(24, U), (24, V)], [(24, U), (90, V)], [(24, U), (24, V), (60, (1, 1, 1))]]
VALUES = {  # of each setting of a random run
    "corpora": ["a", "ab", "ab", "abc", "ba", ["copies/a", "b"], ["a", "other tokens/b"]],
    "mix": [None, [(24, U)], [(48, U)], [(90, U)], *SEVERAL_PHASES],
    "samples": [None, None, None, range(20), range(24), range(1, 21), [*range(16), 1, 2, 3, 4]],
    "which": [0, 0, 1],
    "random_seed": [1, 2],
    "sequence_length": [8, 9],
    "split": ["8,8,0", "16,16,0", "9,8,0"],
    "drop_last_partial_validation_sequence": [True, False],
    "stable_order": [True, False],
    "add_extra_token_to_sequence": [True, True, False],
    "order": ["single", "single", "unsharded 0", "unsharded 1", "sharded 0", "sharded 1"],
}


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_a_state_of_random_runs_fits_only_if_the_samples_are_equal(one, tmp_path, count):
    make_corpora(one, tmp_path)
    no_folder = str(tmp_path / "a.bin")  # the arrays stay in memory
    found = collections.Counter()
    for rng in cases(count):
        run = {name: values[rng.integers(len(values))] for name, values in VALUES.items()}
        other = dict(run)
        for name in rng.permutation(list(VALUES))[: rng.integers(1, 3)]:
            other[name] = VALUES[name][rng.integers(len(VALUES[name]))]
        make = functools.partial(quiet, loader_of_run, one, tmp_path, path_to_cache=no_folder)
        before, after = make(**run), make(**other)
        most = min(len(before.dataset), len(after.dataset)) // 4
        before.consumed_samples = consumed = 4 * int(rng.integers(1, most + 1))
        same_texts = consumed_texts(before, consumed) == consumed_texts(after, consumed)
        fits = False
        with contextlib.suppress(ValueError):
            after.load_state_dict(before.state_dict())
            fits = True
        assert same_texts or not fits, (run, other)
        found[fits] += 1
    assert found[True] and found[False]


def reader(lengths, **methods):
    """A reader of the user's own."""
    return types.SimpleNamespace(sequence_lengths=np.array(lengths, np.int32), **methods)


def test_state_of_custom_datasets(one, tmp_path):
    """A state of the first dataset is loaded for the second; the words say what differs."""

    class Permuted(one.GPTDataset):
        def _build_document_sample_shuffle_indices(self):
            documents, samples, order = super()._build_document_sample_shuffle_indices()
            return documents, samples, np.roll(order, self.config.random_seed)

    class Reversed(one.BlendedDataset):
        def _build_indices(self):
            which, samples = super()._build_indices()
            return which, samples[::-1].copy()

    prefix = mk(one, tmp_path / "p", [[1] * 17, [2] * 9, [3] * 30] * 9)

    def plain(n=40, **fields):
        return quiet(gpt, one, prefix, n, **{"stable_order": True} | fields)

    part_of = torch.utils.data.Subset

    def part(samples, **fields):
        return part_of(plain(80, **fields), samples)

    def chats(n=64, **fields):
        rows = [{"messages": ROW}]
        return one.SFTDataset(rows, None, range(1), n, one.Split.train, config(one, **fields))

    def blend(cls, *phases):
        phases = [(samples, (1, 1)) for samples in phases]
        return cls([plain(80), plain(80)], None, None, plain().config, phases=phases)

    concat = torch.utils.data.ConcatDataset
    two = [part(range(20)), plain()]
    total = len(concat(two))
    blends = [blend(one.BlendedDataset, 40), blend(one.BlendedDataset, 12, 60)]
    of_job = None, range(2), 40, one.Split.train, config(one)
    of_lengths = [one.GPTDataset(reader(lengths), *of_job) for lengths in ([90, 80], [80, 90])]
    named = [reader([90, 80], fingerprint=functools.partial(dict, name=name)) for name in "ab"]
    short = {"split": "valid", "drop_last_partial_validation_sequence": False}
    permuted = [plain(cls=Permuted, random_seed=seed) for seed in (1, 2)]
    later = plain()
    later.config.random_seed = 5  # after it was built
    for before, after, words in (
        (plain(), later, None),
        (plain(**short), plain(80, **short), "epochs was 1 in .* is 2"),  # the last was short
        (plain(documents=np.array([3, 0, 9])), plain(documents=np.array([3, 9, 0])), "documents"),
        (part(range(40)), part([*range(40), 60, 70]), None),
        (part(range(40)), part(range(40), random_seed=5), r"random_seed of data \(p\) was 1234"),
        (Wrapped(blend(one.BlendedDataset, 40)), Wrapped(blend(one.BlendedDataset, 32, 60)), None),
        (concat(two), concat([Numbers(0), *two, plain()]), None),  # added behind, or empty
        (concat(two), concat([two[0], plain(random_seed=5)]), r"random_seed of dataset 1 \(p\)"),
        (concat(two), concat([part(range(40))]), r"first sample .* was \[0, 20\] in .* is \[0\]"),
        (concat([part(range(32)), Numbers(9)]), concat([part(range(33)), Wrapped()]), None),  # grew
        (part_of(concat(two), [5, -1] * 16), part_of(concat(two), [5, total - 1] * 16), None),
        (concat([two[0], blends[0]]), concat([two[0], blends[1]]), None),
        (Wrapped(), type("Renamed", (Wrapped,), {})(), "class was Wrapped .*, and is Renamed."),
        (Wrapped(named[0]), Wrapped(named[1]), "name of fingerprint of data .* was a in"),
        (*of_lengths, r"sequence_lengths \(CRC-32\) differs."),
        (*permuted, r"document_index \(CRC-32\) differs."),
        (blend(Reversed, 40), blend(Reversed, 48), "which sample each corpus gave differs."),
        (chats(), chats(99), None),
        (chats(), chats(sequence_length=9), "sequence_length was 8 in"),
        (chats(), chats(context_parallel_size=2), "context_parallel_size was 1 in"),
    ):
        load_state_of(loader_of(one, before), loader_of(one, after), 32, words)
    assert one.MockGPTLowLevelDataset(Tok()).fingerprint() == {"vocab_size": 1000, "eod": 0}


def test_a_state_of_another_version_or_place_is_refused(one):
    """strict=False accepts a different version, but no position without a sample."""
    loader = loader_of(one, Numbers(64))
    state = loader_of(one, Numbers(64), 16).state_dict()
    other = {"version": 7, "consumed_samples": 16}
    more = state["history"].replace("}}", ', "x": 5}}')
    for changed, words in (
        (other | {"past": 5}, r"version .* was 7 .* is 8\.  .* of megatron_min.*strict=False"),
        (state | {"history": "{}"}, r"kind of the sampler was not set in .*, and is single\. "),
        (state | {"history": more}, r"x was 5 in the state, and is not set\. "),
    ):
        raises(ValueError, f"cannot resume: {words}", loader.load_state_dict, changed)
    less, more = {"corpus": {}, "split": 1}, {"corpus": {"size": 2}, "split": 3}
    assert one._first_difference(less, more) == ("split", 1, 3), "what has no value comes last"
    assert one._first_difference(more, less) == ("split", 3, 1)
    damaged = [state | {"history": text} for text in ("{", None, "[]")]
    damaged += [state | {"consumed_samples": "6"}, state | {"is_end_of_pass": "0"}]
    for value in (None, [], {}, {"weight": torch.ones(2)}, *damaged):
        with pytest.raises(ValueError, match="cannot resume: this is not what a loader's state_d"):
            loader.load_state_dict(value)
    with pytest.raises(ValueError, match="consumed_samples"):
        loader.load_state_dict(state | {"consumed_samples": 65}, strict=False)
    assert loader.state_dict()["consumed_samples"] == 0
    for accepted in (other, {"consumed_samples": 16}):
        loader.load_state_dict(accepted, strict=False)
        assert loader.state_dict() == state


# ==============================================================================
# 11. Gradients
# ==============================================================================


class Net(torch.nn.Module):
    """Tied weights, a branch that few tokens take, parts frozen and unused, a second dtype."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.never = torch.nn.Linear(3, 3)
        self.sometimes = torch.nn.Linear(5, 5)  # of token 0 alone
        self.embedding = torch.nn.Embedding(50, 5)
        self.inner = torch.nn.Linear(5, 7)
        self.outer = torch.nn.Linear(7, 5, dtype=torch.float64)
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.head = torch.nn.Linear(5, 50, bias=False)
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
    """Return {name: gradient}, with zeros if there is none."""
    found = {}
    for name, param in net.named_parameters():
        if param.requires_grad:
            found[name] = torch.zeros_like(param) if param.grad is None else param.grad.clone()
    return found


def gradients_of_one(seeds):
    """Those of one process that runs the steps' data: of the mean over all tokens."""
    net = Net()
    for seed in seeds:
        (losses(net, *step_data(seed)).mean() / len(seeds)).backward()
    return gradients(net)


def close(found, wanted):
    """Two {name: tensor} are equal, but for rounding.  (torch's own imports for a second first.)"""
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert (found[name].dtype, found[name].shape) == (wanted[name].dtype, wanted[name].shape)
        np.testing.assert_allclose(found[name], wanted[name], 1e-5, 1e-6, err_msg=name)


# -- The gradients of one process --------------------------------------------------------------


def one_layer(mm, **options):
    """A model of two numbers and a frozen bias."""
    net = torch.nn.Linear(2, 1)
    net.bias.requires_grad_(False)
    return mm.DistributedDataParallel(net, **options)


def backward_of_ones(layers, value):
    """The gradient of each weight becomes this much larger."""
    for layer in layers:
        (layer.weight * value).sum().backward()


def test_a_gradient_that_would_be_in_no_average_is_refused(one):
    """The model was changed after it was wrapped, or backward ran twice, as in a checkpoint."""
    replaced, unfrozen, frozen, converted = (one_layer(one) for _ in range(4))
    replaced.module.weight = torch.nn.Parameter(torch.ones(1, 2))
    unfrozen.requires_grad_()
    frozen.requires_grad_(False)  # AdamW would move it by a gradient of zeros
    for ddp, words in (
        (replaced, "weight was replaced or unfrozen"),
        (unfrozen, "bias was replaced or unfrozen"),
        (frozen, "weight was frozen"),
    ):
        for method in (ddp.zero_grad_buffer, ddp.finish_grad_sync, ddp.finish_grad_sync):
            raises(ValueError, f"^{words} after .*before wrapping the model$", method)
    raises(RuntimeError, None, converted.double().zero_grad_buffer)
    ddp = one_layer(one, overlap_grad_reduce=True)
    backward_of_ones([ddp.module], 1)
    words = r"of weight arrived after .*overlap_grad.* no_sync\(\) .*reentrant"
    raises(RuntimeError, words, backward_of_ones, [ddp.module], 1)


def test_copies_of_a_model_have_gradients_of_their_own(one):
    """What was pickled too, and a module that is wrapped anew.  They are sent when they come."""
    options = {"overlap_grad_reduce": True}
    original = one_layer(one, **options)
    models = [copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
    module = original.module
    original = weakref.ref(original)
    assert original() is None
    models.append(one.DistributedDataParallel(module, **options))
    for number, ddp in enumerate(models):
        with mock.patch.object(ddp, "_send_next_bucket", wraps=ddp._send_next_bucket) as send:
            ddp(torch.tensor([[3.0, number]])).sum().backward()
        assert send.call_count == 1
    one.finalize_model_grads(models, num_tokens=2)  # of all parts of a model
    for number, ddp in enumerate(models):
        assert lists(ddp.grad_buffers) == [[1.5, number / 2]]
        assert ddp.module.weight.grad.tolist() == [[1.5, number / 2]]


def test_nccl_may_divide_by_the_ranks(one, group, monkeypatch):
    """One process that stands for two ranks: what it would send, and how it is added."""
    monkeypatch.setattr(torch.distributed, "get_world_size", mock.Mock(return_value=2))
    for backend, operation, values in (
        ("nccl", torch.distributed.ReduceOp.AVG, [3, 4]),
        ("gloo", torch.distributed.ReduceOp.SUM, [1.5, 2]),  # it cannot divide in every torch
    ):
        monkeypatch.setattr(torch.distributed, "get_backend", mock.Mock(return_value=backend))
        ddp = one_layer(one, average_in_collective=True)
        ddp(torch.tensor([[3.0, 4.0]])).sum().backward()
        with mock.patch.object(torch.distributed, "all_reduce") as all_reduce:
            ddp.finish_grad_sync()
        assert all_reduce.call_args.args[1] == operation
        assert lists(ddp.grad_buffers) == [values]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_in_float32(one, overlap):
    """In bfloat16, 256 + 1 is 256.  Only zero_grad_buffer() forgets what was summed."""
    layers = torch.nn.ModuleList()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        layers.append(torch.nn.Linear(1, 1, bias=False, dtype=dtype))
    options = {"overlap_grad_reduce": overlap, "grad_reduce_in_fp32": True}
    ddp = one.DistributedDataParallel(layers, **options)
    for step in range(2):
        if step > 0:  # what is new has begun one
            ddp.zero_grad_buffer()
        with ddp.no_sync():
            for value in [256] + 62 * [1]:
                backward_of_ones(layers, value)
        ddp.scale_gradients(0.5)
        backward_of_ones(layers, 1)
        assert all(param.grad is None for param in ddp.parameters())
        ddp.finish_grad_sync()
        ddp.zero_grad()  # not of this class: the sums stay
        ddp.scale_gradients(2)
        assert lists(ddp.grad_buffers) == [4 * [320]]
        for param in ddp.parameters():
            assert (param.grad.dtype, param.grad.item()) == (param.dtype, 320)
        raises(RuntimeError, r"of 0\.weight arrived after.*zero_grad", backward_of_ones, layers, 1)


# -- The micro-batches of a step ---------------------------------------------------------------


def run_step(mm, data, model, means=False, **options):
    """Run forward_backward_no_pipelining() with losses that are sums over tokens, or means."""

    def step(data, model):
        ids, labels, weights = next(data)

        def loss_func(each):
            report = each.detach().mean().item()
            if means:
                return each.mean(), report
            return each.sum(), weights.sum(), report

        return losses(model, ids, labels, weights), loss_func

    options |= {"seq_length": 6, "micro_batch_size": 8, "decoder_seq_length": None}  # as upstream's
    options |= {"forward_step_func": step, "data_iterator": iter(data), "model": model}
    return mm.forward_backward_no_pipelining(num_microbatches=len(data), **options)


@pytest.mark.parametrize("means", [True, False])
def test_a_step_has_the_gradients_of_the_mean_over_its_micro_batches(one, means):
    """forward_only leaves them; if no token counts, all are 0.  A wrapper may wrap the model."""
    data = [step_data(seed) for seed in range(3)]
    uncounted = [(ids, labels, 0 * weights) for ids, labels, weights in data]
    plain, inner = Net(), Net()
    wrapper = torch.nn.Sequential(one.DistributedDataParallel(inner, overlap_grad_reduce=True))
    for net, model in ((plain, plain), (inner, wrapper)):
        wanted = [losses(net, *part).mean().item() for part in data]
        for forward_only in (False, True):
            with torch.set_grad_enabled(not forward_only):
                reports = run_step(one, data, model, means, forward_only=forward_only)
            assert reports == pytest.approx(wanted)
            close(gradients(net), gradients_of_one(range(3)))
        net.zero_grad()
        run_step(one, uncounted, model, means)
        assert not any(gradient.any() for gradient in gradients(net).values())
        raises(ValueError, "num_microbatches must be at least 1, got 0", run_step, one, [], model)
    with mock.patch.object(wrapper[0], "no_sync", wraps=wrapper[0].no_sync) as no_sync:
        run_step(one, data, wrapper, means)
    assert no_sync.call_count == len(data) - 1  # so that what overlaps is sent in the last one


SLOW_DDP, SLOW_FSDP = (pytest.param(name, marks=pytest.mark.slow) for name in ("DDP", "FSDP"))


@pytest.mark.parametrize("kind", ["named so", SLOW_DDP, SLOW_FSDP])
def test_sums_over_the_tokens_of_one_rank_are_refused(one, group, monkeypatch, kind):
    """Where torch averages over several ranks, the tokens of one would divide what is of all."""
    data = [step_data()]
    model = torch.nn.Embedding(50, 50)
    if kind == "named so":  # to import what makes the others takes seconds
        of_torch = {"__module__": "torch.nn.parallel.distributed"}
        model = type("DistributedDataParallel", (torch.nn.Sequential,), of_torch)(model)
        model = torch.nn.Sequential(model)  # as torch.compile() wraps it, too
    elif kind == "FSDP":
        fsdp = importlib.import_module("torch.distributed.fsdp")
        fsdp.fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    else:  # a class of a user's own
        model = type("Own", (torch.nn.parallel.DistributedDataParallel,), {})(model)
    run_step(one, data, model)
    monkeypatch.setattr(torch.distributed, "get_world_size", mock.Mock(return_value=2))
    run_step(one, data, model, means=True)
    run_step(one, data, model, forward_only=True)
    run_step(one, data, Net())  # what a plain model needs, its user knows
    raises(ValueError, "(Distr.*Parallel|FSDPModule) averages .*loss", run_step, one, data, model)


# -- Gradients on ranks: they are equal to the gradients of one process -------------------------
# The scenarios run as in section 9, the first two of them with several of OPTIONS.

FLAGS = ["overlap_grad_reduce", "use_distributed_optimizer", "grad_reduce_in_fp32"]
CHOICES = {"bucket_size": (1, 40, 10**9)} | dict.fromkeys(FLAGS, (False, True))
OPTIONS = [dict(zip(CHOICES, row, strict=True)) for row in itertools.product(*CHOICES.values())]


def check_gradients(ddp, wanted):
    """In grad, and in the buffers; with a distributed optimizer, in this rank's shards."""
    assert ddp.size * sum(map(len, ddp.grad_shards)) == sum(map(len, ddp.grad_buffers))
    parts = ddp.grad_shards if ddp.use_distributed_optimizer else ddp.grad_buffers
    found = [part.clone() for part in parts]
    params = {name: param for name, param in ddp.module.named_parameters() if param.requires_grad}
    for param in params.values():
        assert torch.equal(param.grad, param.main_grad.to(param.dtype))
    for buffer in ddp.grad_buffers:
        buffer.zero_()  # the padding
    for name, param in params.items():
        param.main_grad.copy_(wanted[name])
    close(dict(enumerate(found)), dict(enumerate(parts)))


def gradients_of_several_steps(job, options):
    """The second has no branch; None or zero may be set; to finish twice changes nothing."""
    ddp = job.mm.DistributedDataParallel(Net(), **options)
    for seed, set_to_none in ((0, True), (9, None), (0, False), (0, True)):
        losses(ddp, *job.share(step_data(seed))).mean().backward()
        ddp.finish_grad_sync()
        check_gradients(ddp, gradients_of_one([seed]))
        torch.nn.utils.clip_grad_value_(ddp.parameters(), 0)
        ddp.finish_grad_sync()
        assert not any(gradient.any() for gradient in gradients(ddp.module).values())
        if set_to_none is None or ddp.grad_reduce_in_fp32:
            ddp.zero_grad_buffer()
        else:
            ddp.module.zero_grad(set_to_none)


def gradients_of_uneven_tokens(job, options):
    """They are of the mean over all ranks' tokens; the first rank runs no backward."""
    ids, labels, weights = step_data()
    weights *= torch.from_numpy(np.random.default_rng(14).integers(0, 2, (8, 6)))
    weights[: 8 // job.world] = 0
    weights /= 512  # a number of tokens need not be whole
    net = Net()
    (losses(net, ids, labels, weights).sum() / weights.sum()).backward()
    mine = job.share((ids, labels, weights))
    count = mine[2].sum()
    ddp = job.mm.DistributedDataParallel(Net(), **options)
    for num_tokens in (count, count.item()):
        ddp.zero_grad_buffer()
        if job.rank > 0:
            losses(ddp, *mine).sum().backward()
        job.mm.finalize_model_grads([ddp], num_tokens)
        check_gradients(ddp, gradients(net))


def what_is_not_finite_is_named_with_its_parameter_and_rank(job):
    """Each is named once."""
    last = job.world - 1
    layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
    ddp = job.mm.DistributedDataParallel(layers, check_for_nan_in_grad=True)
    for number, value in enumerate((math.nan, -math.inf)):
        backward_of_ones(layers, 1)
        if job.rank == last:
            backward_of_ones([layers[number]], value)
        teller = "" if job.rank == last else f"rank {last}: "
        words = rf"^{teller}nan or inf in gradients of {number}\.weight; check "
        raises(ValueError, words, ddp.finish_grad_sync)
        layers.zero_grad()
    backward_of_ones(layers, 1)
    ddp.finish_grad_sync()


def one_rank_that_freezes_a_parameter_leaves_no_other_waiting(job, overlap):
    """The rank itself gets an error."""
    ddp = one_layer(job.mm, overlap_grad_reduce=overlap)
    ddp.module.weight.requires_grad_(job.rank > 0)
    if job.rank > 0:
        backward_of_ones([ddp.module], 1)
    with refusal(None if job.rank > 0 else "weight was frozen"):
        ddp.finish_grad_sync()


def gradients_are_sent_during_backward(job):
    """A bucket (here a bias and its weight) is sent once it and all later layers' are complete."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 8))
    ddp = job.mm.DistributedDataParallel(net, bucket_size=9, overlap_grad_reduce=True)
    first, last = net
    for layers, counts in (((last, first), (1, 2)), ((first, last), (0, 2))):
        with counted("all_reduce") as all_reduce:
            for layer, count in zip(layers, counts, strict=True):
                layer(torch.ones(1, 4)).sum().backward()
                assert all_reduce.call_count == count
            ddp.finish_grad_sync()
            assert all_reduce.call_count == 2
    with mock.patch.object(torch.distributed, "all_reduce") as all_reduce:
        last(torch.ones(1, 4)).sum().backward()
        ddp.zero_grad_buffer()  # a sum that arrived later would be of the wrong step
    assert all_reduce.return_value.wait.call_count == all_reduce.call_count == 1
    last(torch.ones(1, 4)).sum().backward()
    ddp.finish_grad_sync()
    assert torch.equal(last.weight.grad, torch.ones(8, 4))


def parameters_of_the_groups_first_rank_reach_all(job):
    """Frozen ones too."""
    pairs = job.mm.ParallelGroups(tensor=2).group("tp")
    for group, first in ((None, 0), (pairs, job.rank // 2 * 2)):
        ddp = job.mm.DistributedDataParallel(Net(), group)
        for param in ddp.parameters():
            param.data.fill_(job.rank + 1)
        ddp.broadcast_params()
        assert all((param == first + 1).all() for param in ddp.parameters())


def gradients_of_parallel_batches(job, layout):
    """Batches that get_batch cuts: over the dp-cp ranks, the gradients of one process."""
    groups = job.mm.ParallelGroups(**layout)
    rng = np.random.default_rng(15)
    whole = hand_made_batch(rng, 8)
    whole["loss_mask"] *= torch.from_numpy(rng.integers(0, 2, (8, LENGTH)))
    net = Net()
    run_step(job.mm, [[whole[key] for key in FIVE[:3]]], net)
    size = groups.size("dp")
    rows = {key: value[groups.rank("dp") :: size] for key, value in whole.items()}
    options = {"micro_batch_size": 8 // size, "sequence_length": LENGTH}
    batch = job.mm.get_batch(iter([rows]), groups, **options)
    data = list(zip(*[batch[key].split(1) for key in FIVE[:3]], strict=True))
    ddp = job.mm.DistributedDataParallel(Net(), groups.group("dp-cp"), overlap_grad_reduce=True)
    run_step(job.mm, data, [ddp])
    check_gradients(ddp, gradients(net))
    ddp = one_layer(job.mm)  # over all ranks: the gradient of each tensor rank is in the sum
    ddp.module.weight.grad.fill_(1)
    job.mm.finalize_model_grads([ddp], 1, groups)
    assert ddp.module.weight.grad.tolist() == [2 * [groups.size("tp")]]


@two_or_four_ranks
def test_ranks_end_with_equal_gradients(tmp_path, world):
    """With a third of the options on two ranks, with all of them on four."""
    steps = [gradients_of_several_steps, gradients_of_uneven_tokens]
    calls = [*itertools.product(steps, OPTIONS[::3] if world == 2 else OPTIONS)]
    freeze = one_rank_that_freezes_a_parameter_leaves_no_other_waiting
    calls += [[what_is_not_finite_is_named_with_its_parameter_and_rank], [freeze, False]]
    calls += [[freeze, True], [gradients_are_sent_during_backward]]
    calls.append([parameters_of_the_groups_first_rank_reach_all])
    for layout in LAYOUTS[world]:
        if "pipeline" not in layout:  # with it some ranks lack tokens or labels
            calls.append([gradients_of_parallel_batches, layout])
    run_on_ranks(world, tmp_path, calls)


# ==============================================================================
# 12. Around the loop
# ==============================================================================
# check_data_consistency() is tested in section 17, whose jobs compare what ranks have.


def test_cyclic_iter_ends_at_two_empty_passes(one):
    """One may be empty, as at the end of a run; two in a row would never end."""
    passes = mock.MagicMock()
    passes.__iter__.side_effect = [iter(items) for items in ([], [1], [], [2], [], [], [3])]
    found = one.cyclic_iter(passes)
    assert (next(found), next(found)) == (1, 2)
    raises(ValueError, "two passes in a row .* fills a round", next, found)


def numbers_of(batches, count=None):
    """The numbers of the next batches, which have no keys any more, as a step may leave them."""
    return [batch.pop("k") for batch in itertools.islice(batches, count)]


def test_rewind_replays_micro_batches(one):
    """They are as they were; a new iterator continues from a state."""
    given = [collections.OrderedDict(k=k) for k in range(9)]
    batches = one.RerunDataIterator(given)
    assert numbers_of(batches, 3) == [0, 1, 2]
    batches.rewind()
    assert numbers_of(batches, 1) == [0]
    batches.advance()
    assert numbers_of(batches, 4) == [1, 2, 3, 4]
    batches.rewind()
    assert next(batches) == given[1]
    resumed = one.RerunDataIterator(given[5:])
    resumed.load_state_dict(batches.state_dict())
    assert numbers_of(batches) == numbers_of(resumed) == [2, 3, 4, 5, 6, 7, 8]
    ended = one.RerunDataIterator([])
    ended.load_state_dict(resumed.state_dict())
    assert numbers_of(ended) == []
    ended.rewind()
    assert numbers_of(ended) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_samples_of_a_run_by_hand(one):
    """16 samples an evaluation: after 30, 60 and 90 steps of 100, and at the end."""
    run = {"global_batch_size": 8, "eval_interval": 30, "eval_iters": 2}
    for arguments, wanted in (
        ({"train_iters": 100}, (800, 4 * 16, 16)),
        ({"train_samples": 719}, (719, 3 * 16, 16)),  # 89 whole steps
        ({"train_samples": 720}, (720, 4 * 16, 16)),
        ({"train_iters": 10, "full_validation": True}, (80, None, 16)),
        ({"train_iters": 9, "skip_train": True, "eval_interval": 0}, (72, 16, 16)),
        ({"train_iters": 120, "train_samples": 719}, (719, 5 * 16, 16)),  # the batch size grew
        ({"train_iters": np.uint8(200), "global_batch_size": np.uint8(200)}, (40_000, 2800, 400)),
    ):
        assert one.get_train_valid_test_num_samples(**run | arguments) == wanted
    for arguments, words in (
        ({"skip_train": True}, "train_iters, train_samples"),
        ({"train_iters": 9, "eval_interval": 0}, "eval_interval: .*got 0"),
        ({"train_samples": 9, "global_batch_size": 0}, "global_batch_size: .*got 0"),
        ({"train_iters": 9.5}, r"train_iters: .*got 9\.5"),
    ):
        raises(ValueError, words, one.get_train_valid_test_num_samples, **run | arguments)


def test_invalid_rampup_raises(one):
    """A ramp-up is compared with upstream's under Parity."""
    for ramp in (None, (16, 8, 0), (32, 8, 100)):
        number = one.NumMicroBatches(32, 4, 2, ramp)
        assert (number.get(), number.get_current_global_batch_size()) == (4, 32)
    for size, micro, ramp, words in (
        (30, 4, None, "of 30"),
        (32, 4, (16, 6, 9), "increments of 6 from 16 .* 32"),
        (32, 4, (0, 8, 9), "of 0"),
        (32, -4, None, "multiple of -8"),
    ):
        raises(ValueError, words, one.NumMicroBatches, size, micro, 2, ramp)


# ==============================================================================
# 14. Complete files
# ==============================================================================


def make_pair(one, folder, generation):
    """A pair and its record, of sizes that are the same in each of two generations."""
    with one.IndexedDatasetBuilder(folder / "p.bin", np.uint8, multimodal=True) as builder:
        lengths = [1, 3] if generation == 1 else [3, 1]
        builder.add_document([generation] * 4, lengths, [generation, generation])
    one._write_record(folder / "p", None, [[f"{generation}.jsonl", 1]])


@pytest.fixture(params=["an old pair", "no old pair"])
def old_and_new(request, one, tmp_path):
    """The files before make_pair() makes the second generation, and after, {name: bytes}."""
    found = []
    for generation in (1, 2):
        folder = tmp_path / f"{generation}"
        folder.mkdir()
        if generation == 2 or request.param == "an old pair":
            make_pair(one, folder, generation)
        found.append(files_of(folder))
    return found


def run_with(faults, one, tmp_path):
    """Make the second generation in a new folder -> its files, and the error or None."""
    folder = tmp_path / "made"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tmp_path / "1", folder)
    failure = None
    try:
        with faults:
            make_pair(one, folder, 2)
    except (OSError, KeyboardInterrupt) as error:
        error.__context__ = error.__cause__ = None  # these and the traceback hold what the job has
        failure = error.with_traceback(None)
    return files_of(folder), failure


def what_is_left(files, old, new, note, clean=True):
    """Return which pair is in the files, and where; clean: no other temporary file is there."""
    temporary = {name for name in files if name.endswith(".tmp")}
    names = ["p.bin", "p.idx"]
    if "p.idx" not in files and (old or "p.bin" in files):
        [names[1]] = [name for name in temporary if name.startswith("p.idx.")]
        if names[1].replace("idx", "bin") in files:
            names[0] = names[1].replace("idx", "bin")
    assert not clean or temporary <= set(names), note
    pair = [files.get(name) for name in names]
    for made, kind in ((old, "old"), (new, f"new, {len(temporary & set(names))} to be renamed")):
        if pair == [made.get("p.bin"), made.get("p.idx")]:
            assert files.get("p.record.json") in (None, made.get("p.record.json")), note
            return kind
    raise AssertionError(note)


@contextlib.contextmanager
def calls_on_files(one, folder, names, seen, at=None, works=False):
    """In a with block, the calls that make, sync, name, look for and remove files.

    names  gets their names
    seen   gets the files of the folder before each, {name: bytes}: what a kill -9 would leave
    at     the number of the one that fails, from 1 on, or None
    works  does it do its work before, as a rename over a network may that then fails?
    """

    def call(name, function, *arguments, **options):
        names.append(name)
        seen.append(files_of(folder))
        fails = len(names) == at
        try:
            if works or not fails:
                return function(*arguments, **options)
        finally:
            if fails:
                raise OSError(errno.EIO, "broken")

    with pytest.MonkeyPatch.context() as patches, contextlib.ExitStack() as at_the_end:
        gc.disable()  # what earlier tests left would close its files among the calls
        at_the_end.callback(gc.enable)
        for name in ("open", "close", "fsync", "replace", "unlink", "lstat"):
            patches.setattr(os, name, functools.partial(call, name, getattr(os, name)))
        patches.setattr(one, "open", functools.partial(call, "open", open), raising=False)
        yield


def test_a_commit_that_is_killed_or_fails_at_any_call_on_files(one, tmp_path, old_and_new):
    """What fails may have been made.  The error names the files that are to be renamed."""
    old, new = old_and_new
    usual = []
    seen = []
    made = calls_on_files(one, tmp_path / "made", usual, seen)
    assert run_with(made, one, tmp_path) == (new, None)
    steps = [name for name in usual if name in ("fsync", "replace")]
    assert steps == ["fsync", "fsync", "replace", "replace", "fsync", "replace"]  # + the record
    kinds = [what_is_left(files, old, new, "killed", clean=False) for files in seen]
    counts = (2, 1, 0) if old else (1, 0)
    assert list(dict.fromkeys(kinds)) == ["old", *[f"new, {n} to be renamed" for n in counts]]
    for at, works in itertools.product(range(1, len(usual) + 1), (False, True)):
        note = (at, usual[at - 1], works)
        faults = calls_on_files(one, tmp_path / "made", [], [], at, works)
        files, error = run_with(faults, one, tmp_path)
        what_is_left(files, old, new, note)
        if error is None:  # it did not remove what was not there any more
            assert (usual[at - 1], files) == ("unlink", new), note
        else:
            assert error.errno == errno.EIO, note
            named = [name for name in files if name.endswith(".tmp")]
            assert all(name in str(error) for name in named), note
            assert not named or ".tmp, the .bin first" in str(error), note


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_a_temporary_file_that_somebody_has_removed(one, tmp_path, end):
    """The old pair stays."""
    prefix = mk(one, tmp_path / "p", [[1, 2]])
    old = bytes_of_pair(prefix)

    def remove_and_sync(descriptor):
        for path in tmp_path.glob(f"p.{end}.*"):
            path.unlink()

    with mock.patch.object(os, "fsync", remove_and_sync):
        raises(FileNotFoundError, rf"p\.{end}\..*\.tmp", mk, one, tmp_path / "p", [[3, 4]])
    assert bytes_of_pair(prefix) == old


@contextlib.contextmanager
def ctrl_c(one, kind, at):
    """Raise KeyboardInterrupt before line (or opcode) number `at` of the module in this thread."""
    numbers = itertools.count(1)

    def trace(frame, event, argument):
        if frame.f_code.co_filename != one.__file__:
            return None
        frame.f_trace_opcodes = kind == "opcode"
        if event == kind and next(numbers) == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("kind", ["line", pytest.param("opcode", marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment(one, tmp_path, old_and_new, kind):
    """Leaves the old pair, or the new one, and no other file."""
    old, new = old_and_new
    kinds = set()
    error = "none yet"
    number = 0
    while error is not None:
        number += 1
        # In a thread of its own: Python 3.11 may forget there that an error is dealt with.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            files, error = pool.submit(run_with, ctrl_c(one, kind, number), one, tmp_path).result()
        kinds.add(what_is_left(files, old, new, number))
    assert files == new
    assert len(kinds) == (4 if old else 3)


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_a_folder_that_cannot_be_synced(one, tmp_path, monkeypatch, call):
    """Some systems cannot do that, or cannot open it: no error, unless it tells of the disk."""
    original = getattr(os, call)

    def fail(target, *arguments):
        if os.path.isdir(target):
            raise OSError(code, "broken")
        return original(target, *arguments)

    monkeypatch.setattr(os, call, fail)
    for code in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
        mk(one, tmp_path / f"{code}", [[1]])
    for code in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(OSError, match=rf"{code}\.bin and .*{code}\.idx") as caught:
            mk(one, tmp_path / f"{code}", [[1]])
        assert caught.value.errno == code
    assert one.IndexedDataset(tmp_path / f"{code}")[0].tolist() == [1]


def test_an_error_of_the_disk_without_a_number(one, tmp_path, monkeypatch):
    """It is an OSError that names the file, in a write as in a commit."""
    stale = OSError("stale file handle")
    file = one._NewFile(tmp_path / "f")
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(one, "_remove_path", mock.Mock(side_effect=KeyboardInterrupt))
        file.discard()  # a second signal arrives; the end of the process removes the file
    assert file.is_open and file._remove.atexit
    file.discard()
    assert not file.is_open and os.listdir(tmp_path) == []
    file = one._NewFile(tmp_path / "f")
    file.file = mock.Mock(write=mock.Mock(side_effect=stale))
    raises(OSError, r"/f\..*\.tmp: .*stale", file.write, b"1")
    with before_rename(1, mock.Mock(side_effect=stale)):  # that of the .idx
        raises(OSError, r"/p\.bin.*: .*stale", mk, one, tmp_path / "p", [[1]])
    builder = one.IndexedDatasetBuilder(tmp_path / "q.bin")
    with mock.patch.object(os, "fsync", side_effect=stale):
        raises(OSError, r"/q\.bin.*: .*stale", builder.finalize, tmp_path / "q.idx")
    # a second fsync() may report success
    raises(ValueError, "failed write", builder.finalize, tmp_path / "q.idx")


# ==============================================================================
# 15. The index cache
# ==============================================================================


@pytest.fixture
def cache(tmp_path):
    """The folder of a cache, which is not there yet."""
    return str(tmp_path / "cache")


def heard(function, *arguments, **options):
    """What a call returns, and the messages of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of objects of other tests
        found = function(*arguments, **options)
    return found, [str(warning.message) for warning in caught]


def start(mm, corpus, cache, *words, n=50, wanted=None, **fields):
    """The GPTDataset of a job that starts, with these arrays, and a warning for each word."""
    ds, messages = heard(gpt, mm, corpus, n, path_to_cache=cache, **fields)
    for word, message in zip(words, messages, strict=True):
        assert re.search(word, message)
        assert "{" not in message  # no dict of a manifest
    if wanted is not None:
        same_arrays(arrays(ds), wanted)
    return ds


def stamps(folder):
    """Return {name: (time, inode)}: it differs if a file is written again."""
    stats = {path.name: path.stat() for path in pathlib.Path(folder).iterdir()}
    return {name: (stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


def test_a_cache_is_built_once_then_found(one, pair, cache, monkeypatch):
    """Flags that upstream's key leaves out are in it, documents are not; a range is as a list."""
    build = mock.Mock(wraps=one.build_sample_idx)
    monkeypatch.setattr(one, "build_sample_idx", build)
    num_files = 0
    for fields in (
        {"split": "train"},
        {"split": "train", "add_extra_token_to_sequence": False},
        {"split": "valid", "drop_last_partial_validation_sequence": False},
        {"stable_order": True, "fast_cache_load": True, "defer_npy_index_mmap": True},
        *[{"documents": numbers} for numbers in ([0, 1], [0, 2, 1, 3], [3, 2, 1])],
    ):
        options = {"n": 9, "wanted": arrays(quiet(gpt, one, pair, 9, **fields)), **fields}
        words = [r"made from different data \(.*documents"] if "documents" in fields else []
        saved = start(one, pair, cache, *words, **options)
        build.reset_mock()
        before = stamps(cache)
        for ds in (saved, start(one, pair, cache, **options)):
            with pytest.raises(ValueError, match="read-only"):
                ds.shuffle_index[0] = 1
        assert build.call_count == 0
        assert stamps(cache) == before
        num_files += 0 if words else 5
        assert len(before) == num_files, fields
    start(one, pair, cache, **options | {"documents": range(3, 0, -1)})
    assert files_of(cache) == files_of(f"{pair}/cache/GPTDataset_indices")  # without path_to_cache


RUNS_CODE = b"cposix\nsystem\n(S'touch ran'\ntR."  # where something unpickles it


def test_what_a_start_finds_wrong_is_rebuilt(one, pair, cache, monkeypatch):
    """The files become the same again; one warning says why, and none if no manifest is there."""
    monkeypatch.chdir(os.path.dirname(pair))
    wanted = arrays(start(one, pair, cache))
    before = files_of(cache)
    text = file_of(cache, "manifest.json").read_bytes()
    manifest = json.loads(text)
    other_facts = manifest | {"facts": [1] * len(manifest["facts"])}
    older = manifest | {"format": manifest["format"] - 1}
    array = file_of(cache, "sample_index.npy").read_bytes()
    for file, content, *words in (
        ("manifest.json", None),
        ("manifest.json", json.dumps(older).encode()),
        ("manifest.json", text[:-1], "manifest.json: "),
        ("manifest.json", json.dumps(other_facts).encode(), "damaged"),
        ("sample_index.npy", array[:-5], "sample_index.npy .*size was"),
        ("sample_index.npy", array[:-8] + bytes(8), "sample_index.npy .*crc32"),
        ("document_index.npy", None, "document_index.npy"),
    ):
        path = file_of(cache, file)
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        start(one, pair, cache, *[f"is rebuilt: .*{word}" for word in words], wanted=wanted)
        assert files_of(cache) == before, file
        start(one, pair, cache, wanted=wanted)
    forged = RUNS_CODE.ljust(len(array))  # of a size and a CRC that fit
    file_of(cache, "sample_index.npy").write_bytes(forged)
    manifest["files"]["sample_index"]["crc32"] = zlib.crc32(forged)
    del manifest["crc32"]
    manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())
    file_of(cache, "manifest.json").write_text(json.dumps(manifest))
    quiet(gpt, one, pair, 50, path_to_cache=cache)
    assert not os.path.exists("ran")
    path.write_bytes(b"")
    before = files_of(cache)
    failing = mock.Mock(side_effect=OSError("the build"))
    monkeypatch.setattr(one, "build_sample_idx", failing)
    raises(OSError, "^the build$", quiet, start, one, pair, cache)
    assert failing.call_count == 1
    assert files_of(cache) == before


def test_regenerated_data_make_a_cache_stale(one, tmp_path, cache):
    """So does a cache that a job saves later from the old data.  Upstream uses old indices."""
    old = random_docs(np.random.default_rng(5), most=40) * 3
    for docs, word in (([[1, 2, 3]] * 20, "documents"), (old[::-1], "the corpus has changed")):
        corpus = mk(one, tmp_path / word, old)
        os.utime(f"{corpus}.idx", (1, 1))
        opened = start(one, corpus, cache)
        mk(one, corpus, docs)
        os.utime(f"{corpus}.idx", (1, 1))  # as what unpacks it may do: size and time are the same
        wanted = arrays(start(one, corpus, f"{cache} of the new"))
        start(one, corpus, cache, word, wanted=wanted)
        shutil.rmtree(cache)
        of_job = opened.indices, 50, opened.index_split, opened.config
        one.GPTDataset(opened.dataset, corpus, *of_job)
        start(one, corpus, cache, word, wanted=wanted)
        start(one, corpus, cache)


def test_different_lengths_of_a_users_reader_make_a_cache_stale(one, cache):
    """It has no fingerprint, and its path and its documents are the same."""
    for lengths, num_warnings in (([9, 7], 0), ([9, 7], 0), ([7, 9], 1)):
        of_job = reader(lengths), None, range(2), 4, one.Split.train
        found, messages = heard(one.GPTDataset, *of_job, config(one, path_to_cache=cache))
        same_arrays(arrays(found), arrays(one.GPTDataset(*of_job, config(one))))
        assert len(messages) == num_warnings


def test_lengths_that_a_user_sets_are_in_cache_and_state(one, tmp_path, cache):
    """Both have one cache, so each start rebuilds it; a copy of the lengths changes nothing."""
    corpus = mk(one, tmp_path / "p", [[number] * 30 for number in range(20)])
    checked, copied = (one.IndexedDataset(corpus, check=True) for _ in range(2))
    checked.sequence_lengths = np.minimum(checked.sequence_lengths, 4)
    copied.sequence_lengths = copied.sequence_lengths.copy()
    plain = one.IndexedDataset(corpus)

    def over(reader, folder):
        of_job = range(20), None, one.Split.train, config(one, path_to_cache=folder)
        return one.GPTDataset(reader, corpus, *of_job)

    before = loader_of(one, over(plain, None))
    for reader, n, warned in ((plain, 74, 0), (checked, 9, 1), (copied, 74, 1), (plain, 74, 0)):
        fresh = quiet(over, reader, f"{corpus}.bin")
        ds, messages = heard(over, reader, cache)
        assert [" made from " in message for message in messages] == [True] * warned
        again, messages = heard(pickle.loads, pickle.dumps(ds))
        assert messages == []
        for found in (ds, again):
            same_arrays(arrays(found), arrays(fresh))
            same(found.dataset.sequence_lengths, reader.sequence_lengths)
            same_samples(found[0], fresh[0])
            assert len(found) == n
            words = r"sequence_lengths \(CRC-32\) differs." if n == 9 else None
            load_state_of(before, loader_of(one, found), 4, words)
        assert reader.fingerprint() == plain.fingerprint()
        of_pair = one._provenance_of(reader, None, {})  # for a loader of the sequences
        assert ("sequence_lengths (CRC-32)" in of_pair) == (n == 9)
    patch(f"{corpus}.idx", 34, b"\xff\xff\xff\xff")
    damaged = one.IndexedDataset(corpus)
    damaged.sequence_lengths = checked.sequence_lengths
    raises(one.DatasetFormatError, r"lengths\[0\]: .*-1", damaged.verify)


def test_a_touched_pair_and_a_copy_find_the_cache(one, pair, cache, tmp_path, monkeypatch):
    """A copy is verified; a relative path_to_cache means the folder in which the job started."""
    monkeypatch.chdir(tmp_path)
    ds = start(one, "pair", "cache")
    blend = one.BlendedDataset([ds, ds], [1, 1], 9, ds.config)
    before = stamps(cache)
    (tmp_path / "node 1").mkdir()
    monkeypatch.chdir(tmp_path / "node 1")
    again = pickle.loads(pickle.dumps(blend))
    same_arrays(arrays(again.datasets[0]), arrays(ds))
    same_samples(again[3], blend[3])
    assert os.listdir() == []
    for kind in ("bin", "idx"):
        shutil.copyfile(f"{pair}.{kind}", f"pair.{kind}")
        os.utime(f"{pair}.{kind}", (1, 1))
    for folder in (tmp_path, tmp_path / "node 1"):
        monkeypatch.chdir(folder)
        start(one, "pair", cache)
    assert stamps(cache) == before
    patch("pair.idx", 34 + 12 * 4 + 8, b"\7")
    raises(one.DatasetFormatError, r"document_indices\[2\]", quiet, start, one, "pair", cache)


# -- what is mapped, and what travels ----------------------------------------------------------


def is_mapped(folder):
    """Has this process mapped a file of the folder?"""
    return str(folder) in pathlib.Path("/proc/self/maps").read_text()


@linux
@pytest.mark.parametrize("size, n", [(25_000, 700), (200_000, 6000), (1_100_000, 35_000)])
def test_small_arrays_are_read_and_checked_whole(one, tmp_path, cache, monkeypatch, size, n):
    """Up to 64 KiB an array is read, and else mapped; up to 1 MiB, all its bytes are checked.

    A larger array is on the disk before it has its name, and only its ends are checked.  An array
    or .idx that the system refuses to map is read; for a .bin, the error says what to do.
    """
    corpus = mk(one, tmp_path / "p", np.ones((4000, 1), np.int32))
    synced = []

    def sync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", sync)
    wanted = arrays(start(one, corpus, cache, n=n))
    path = file_of(cache, "document_index.npy")
    before = path.read_bytes()
    assert size < len(before) < 1.3 * size
    assert len(synced) == ("document_index" in "".join(synced)) == (size > 1 << 20)
    for place in (4096, len(before) - 4100, 4090, len(before) - 4096):
        is_seen = size < 1 << 20 or not 4096 <= place < len(before) - 4096
        times = path.stat().st_mtime_ns, path.stat().st_mtime_ns
        path.write_bytes(before)
        patch(path, place, b"\xff\xff\xff\xff")
        os.utime(path, ns=times)  # with another one it is not read
        ds = start(one, corpus, cache, *(["crc32"] if is_seen else []), n=n)
        assert is_mapped(path) == (size > 1 << 16)
        assert not is_seen or path.read_bytes() == before
        same(ds.document_index, np.load(path))
        del ds
        assert not is_mapped(path)
    monkeypatch.setattr(np, "memmap", mock.Mock(side_effect=OSError(errno.ENODEV, "refused")))
    raises(OSError, r"mmap_bin_files=False.* refused: .*/p\.bin", one.IndexedDataset, corpus)
    for folder in (cache, f"{cache} of the new"):
        start(one, corpus, folder, n=n, wanted=wanted, mmap_bin_files=False)


@linux
def test_a_pickle_has_no_array_that_is_in_a_file(one, tmp_path, cache):
    """Unpickling opens them, or builds and saves them; an array that a user set is pickled."""
    corpus = mk(one, tmp_path / "p", [[1] * 8] * 3000)
    cfg = config(one, ([corpus, corpus], [1, 2]), path_to_cache=cache)
    ks = [0, 77, -1, None]
    built = build(one, [13_000, 0, 0], cfg)[0]
    wanted = batch_of(built, ks)
    text = pickle.dumps(built)
    assert len(text) < 10_000 < built.datasets[0].indices.nbytes
    assert is_mapped(cache)
    part = built.datasets[1]
    part.shuffle_index = part.shuffle_index[::-1].copy()
    same_arrays(arrays(pickle.loads(pickle.dumps(part))), arrays(part))
    del built, part
    assert not is_mapped(cache)
    before = files_of(cache)
    for _ in range(2):
        again, messages = heard(pickle.loads, text)
        assert messages == []
        same_samples(batch_of(again, ks), wanted)
        assert files_of(cache) == before
        shutil.rmtree(cache)


# -- errors of the disk, and other jobs --------------------------------------------------------


def before_rename(number, act):
    """A patch: before file number 0, 1, ... gets its name, act() is called."""
    rename = os.replace
    numbers = itertools.count()

    def act_and_rename(source, target):
        if next(numbers) == number:
            act()
        rename(source, target)

    return mock.patch.object(os, "replace", act_and_rename)


@pytest.mark.parametrize("number", range(5))
def test_a_job_that_dies_or_whose_disk_is_full_in_the_middle(one, pair, cache, number):
    """Nothing that it leaves is used; if nothing can be written, the arrays stay in memory."""
    start(one, pair, cache)
    mk(one, pair, [[1] * 20] * 7)
    wanted = arrays(start(one, pair, f"{cache} of the new"))

    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with before_rename(number, full):
        ds = start(one, pair, cache, "is rebuilt", "cannot be written.*No space left")
    below_file = start(one, pair, f"{pair}.bin/below", "cannot be written")
    pathlib.Path(pair).touch()  # the default is a folder below it
    beside_pair = start(one, pair, None, "cannot be written")
    for dataset in (ds, pickle.loads(pickle.dumps(ds)), below_file, beside_pair):
        same_arrays(arrays(dataset), wanted)
    assert not any(name.endswith((".tmp", "manifest.json")) for name in os.listdir(cache))
    for _ in range(2):
        start(one, pair, cache, wanted=wanted)


def test_another_job_writes_the_cache_while_it_is_found(one, pair, cache, monkeypatch):
    """Where its arrays have the sizes, and the CRCs, of the old ones, a mix would not be seen."""
    monkeypatch.setattr(zlib, "crc32", mock.Mock(return_value=0))
    wanted = arrays(start(one, pair, cache))
    as_array = one._as_array

    def open_one_and_write(*arguments):
        monkeypatch.setattr(one, "_as_array", as_array)
        start(one, pair, cache, "made from", documents=[3, 2, 1, 0])
        return as_array(*arguments)

    monkeypatch.setattr(one, "_as_array", open_one_and_write)
    start(one, pair, cache, "another job", wanted=wanted)


@pytest.mark.parametrize("number", [2, 3])
def test_two_jobs_write_a_cache_at_one_moment(one, pair, cache, number):
    """An array of the one beside the manifest of the other is found at the next start."""
    wanted = arrays(start(one, pair, f"{cache} of one job"))
    other_job = functools.partial(start, one, pair, cache, documents=[3, 2, 1, 0])
    with before_rename(number, other_job):
        start(one, pair, cache, wanted=wanted)
    start(one, pair, cache, "crc32", wanted=wanted)
    start(one, pair, cache, wanted=wanted)


def test_a_large_array_with_a_different_time_is_built_again(one, tmp_path, cache, monkeypatch):
    """Another job may have written it, or somebody in place.  There is no warning."""
    corpus = mk(one, tmp_path / "p", [[1] * 9000] * 20)
    wanted = arrays(gpt(one, corpus, sequence_length=1))
    build = mock.Mock(wraps=one.build_sample_idx)
    monkeypatch.setattr(one, "build_sample_idx", build)

    def check(is_found, folder=cache):
        for num_builds in (0 if is_found else 1, 0):
            build.reset_mock()
            start(one, corpus, folder, n=None, wanted=wanted, sequence_length=1)
            assert build.call_count == num_builds

    check(False)
    path = file_of(cache, "sample_index.npy")
    own = path.read_bytes()
    foreign = own[:9000] + bytes(9000) + own[18_000:]  # with equal ends
    for content, later, is_found in (
        (foreign, 1, False),  # by one nanosecond
        (own, -(10**9), False),
        (own, None, True),  # whole seconds, as tar and some file systems have them
    ):
        saved = path.stat().st_mtime_ns
        written = saved - saved % 10**9 if later is None else saved + later
        path.write_bytes(content)
        os.utime(path, ns=(written, written))
        check(is_found)
        assert path.read_bytes() == own
    shutil.copytree(cache, f"{cache} 2")  # with times
    check(True, f"{cache} 2")

    # The own file gets the name while the foreign file is open.
    memmap = np.memmap
    shutil.copy2(path, tmp_path / "own.npy")
    path.write_bytes(foreign)
    os.utime(path, (1, 1))

    def map_and_replace(file, *arguments):
        mapped = memmap(file, *arguments)
        if len(mapped) == len(own) and (tmp_path / "own.npy").exists():
            os.replace(tmp_path / "own.npy", path)
        return mapped

    monkeypatch.setattr(np, "memmap", map_and_replace)
    check(False)


def test_two_writers_in_all_orders_of_their_steps(one, tmp_path, cache, monkeypatch):
    """After each step of all 252 orders, a reader has the arrays of its data, or none."""
    monkeypatch.setattr(one, "_FULL_CHECK_LIMIT", 1 << 12)
    steps = []  # of one writer, then of the other: a link to the new file or None, the name

    def rename(source, target):
        steps.append((tmp_path / f"{len(steps)}", target))
        os.link(source, steps[-1][0])

    def remove(path, missing_ok):
        steps.append((None, str(path)))

    lengths = np.full(20, 150)
    for _ in range(2):
        corpus = mk(one, tmp_path / "p", [[1] * n for n in lengths])
        time.sleep(0.02)  # some file systems have times of 10 ms
        with monkeypatch.context() as patches:
            patches.setattr(os, "replace", rename)
            patches.setattr(pathlib.Path, "unlink", remove)
            ds = gpt(one, corpus, path_to_cache=cache, sequence_length=1)
        lengths[ds.document_index[[7, 12]]] += [-9, 9]  # only the middle of sample_index differs
    wanted = arrays(ds)
    steps = [step for step in steps if not step[1].endswith("description.txt")]
    made_from = json.loads(steps[-1][0].read_bytes())["made_from"]
    stem = steps[-1][1].removesuffix("-manifest.json")
    found_at = set()
    for second in itertools.combinations(range(10), 5):
        shutil.rmtree(cache)
        os.mkdir(cache)
        jobs = iter(steps[:5]), iter(steps[5:])
        for number in range(10):
            file, name = next(jobs[number in second])
            pathlib.Path(name).unlink(missing_ok=True)
            if file is not None:
                os.link(file, name)
            with contextlib.suppress(one.DatasetFormatError, FileNotFoundError):
                _, found = one._read_arrays(stem, made_from, ds.dataset)
                if found:
                    same_arrays(found.values(), wanted)
                    found_at.add(number)
    assert found_at == {4, 5, 6, 7, 8, 9}


# ==============================================================================
# 16. Object storage
# ==============================================================================
# Memory, a web server that a test can make fail, and, once, S3.

SECRET = "s3cret"
MEMORY = fsspec.get_filesystem_class("memory")


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """Serves the files of a folder, whole or a range of them."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet

    def log_message(self, *details):
        """Nothing."""

    def do_GET(self):
        name = self.path.partition("?")[0].rpartition("/")[2]
        wanted = self.headers.get("Range", "")
        self.server.requests.append((self.command, name, wanted))
        path = pathlib.Path(self.server.folder, name)
        fault = next(self.server.faults, None)
        status, body = 404, b""
        if isinstance(fault, int):
            status = fault
        elif path.is_file():
            status, body = 200, path.read_bytes()
        self.send_response(206 if wanted and status == 200 else status)
        self.send_header("ETag", hashlib.md5(body).hexdigest())
        self.send_header("Accept-Ranges", "bytes")
        if wanted and body and fault != "whole":
            first, last = map(int, re.findall(r"\d+", wanted))
            body = body[first : last + 1]
        if fault == "short":
            body = body[1:]
        if fault == "no length":
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET


def put(prefix, root, folder=None):
    """Copy a local pair to object storage -> its prefix there; folder: where root's files lie."""
    file_system, place = fsspec.core.url_to_fs(str(folder or root))
    name = os.path.basename(prefix)
    for extension in ("bin", "idx"):
        file_system.put_file(f"{prefix}.{extension}", f"{place}/{name}.{extension}")
    return f"{root}/{name}"


@pytest.fixture
def no_pauses(tmp_path, monkeypatch):
    """The pauses that were asked for, which do not come; copies of .idx files below tmp_path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


@pytest.fixture
def bucket(no_pauses, monkeypatch):
    """The URL of object storage in this process, empty."""
    monkeypatch.setattr(MEMORY, "store", {})
    monkeypatch.setattr(MEMORY, "pseudo_dirs", [""])
    return "memory://bucket"


@pytest.fixture
def web(no_pauses, tmp_path):
    """A web server that serves ranges, and writes nothing."""
    pytest.importorskip("aiohttp")
    folder = tmp_path / "web"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), RangeHandler) as server:
        server.daemon_threads = True
        server.socket.listen(256)  # a batch opens many at once; those over the limit wait
        server.folder = folder
        server.root = f"http://127.0.0.1:{server.server_port}/bucket"
        server.requests = []
        server.faults = iter([])  # of the next requests: a status, a word, or None
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def some_pair(one, tmp_path):
    """A local pair of 60 documents, some of them empty -> (prefix, documents)."""
    rng = np.random.default_rng(7)
    docs = [rng.integers(1, 900, n) for n in rng.integers(0, 30, 60)]
    docs[1] = np.arange(100, 120)
    return mk(one, tmp_path / "local" / "pair", docs, np.uint16), docs


@linux
def test_a_remote_pair_equals_the_local_one(one, web, some_pair, no_pauses):
    """It can be read in pieces, many at once, in threads and in forked processes."""
    prefix, docs = some_pair
    with pytest.raises(FileNotFoundError, match=re.escape(f"{web.root}/pair.idx")):
        one.IndexedDataset(f"{web.root}/pair")
    assert not one.IndexedDataset.exists(f"{web.root}/pair")
    ds = one.IndexedDataset(put(prefix, web.root, web.folder), check=True)
    assert one.IndexedDataset.exists(f"{web.root}/pair")
    assert no_pauses == []
    assert lists(ds[:]) == [doc.tolist() for doc in docs]
    same(ds.get(3 - 60, 2, 4), docs[3][2:6].astype(np.uint16))
    assert ds.get_many([]) == ds[5:5] == []
    raises(IndexError, None, ds.get_many, [(1, 0, 0), (0, 0, len(docs[0]) + 1)])
    of_processes = concurrent.futures.ProcessPoolExecutor(2, FORK)
    for pool in (concurrent.futures.ThreadPoolExecutor(4), of_processes):
        with pool:
            assert lists(pool.map(ds.get, range(20))) == lists(docs[:20])


@pytest.mark.slow
def test_pair_on_s3_is_read(one, no_pauses, some_pair, tmp_path, monkeypatch):
    """A pair is read; a listing that fsspec keeps is not taken for the state of an object."""
    s3fs = pytest.importorskip("s3fs", reason="pip install s3fs")
    moto = pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    file_system = s3fs.S3FileSystem()
    file_system.mkdir("bucket")
    prefix, docs = some_pair
    place = put(prefix, "s3://bucket/data")
    assert lists(one.IndexedDataset(place)[:]) == [doc.tolist() for doc in docs]
    file_system.find("bucket")
    of_another_process = s3fs.S3FileSystem(skip_instance_cache=True)
    of_another_process.pipe_file("bucket/data/pair.idx", b"another index")
    raises(one.DatasetFormatError, "file size.* 13", one.IndexedDataset, place)
    for k in range(2):  # the second list has one more
        of_another_process.pipe_file(f"bucket/{k}.jsonl", GOOD)
        made = one.preprocess("s3://bucket/*.jsonl", tmp_path / "o")["text"]
        assert len(one.IndexedDataset(made)) == k + 1
    server.stop()


def test_a_batch_is_one_read(mm, bucket, some_pair, tmp_path):
    """All pieces of a batch, also of padding; of a blend one for each of its corpora."""
    prefix, docs = some_pair
    prefixes = [prefix, mk(mm, tmp_path / "local" / "second", docs[::-1], np.uint16)]
    fields = {"path_to_cache": str(tmp_path / "cache"), "sequence_length": 16}
    local = build(mm, [50, 0, 0], config(mm, (prefixes, [2, 3]), **fields))[0]
    prefixes = [put(prefix, bucket) for prefix in prefixes]
    remote = build(mm, [50, 0, 0], config(mm, (prefixes, [2, 3]), **fields))[0]
    ds = remote.datasets[0]
    for read, argument, wanted in (
        (ds.__getitem__, 5, 1),
        (ds.dataset.__getitem__, slice(1, 9), 1),
        (functools.partial(batch_of, remote), [*range(40), None], 2),
    ):
        real = MEMORY.cat_ranges
        with mock.patch.object(MEMORY, "cat_ranges", autospec=True, side_effect=real) as calls:
            read(argument)
        assert calls.call_count == wanted, (read, argument)
    same_samples(batch_of(remote, [*range(40), None]), batch_of(local, [*range(40), None]))


def read_after_the_workers(one, prefix, folder):
    """A batch in this process, after worker processes of torch have read theirs."""
    train = gpt(one, prefix, 200, path_to_cache=str(folder))
    for _ in range(2):
        list(loader_of(one, train, num_workers=2))
        train[7]


def preprocess_with_a_tokenizer_that_reads(one, prefix, folder):
    """The tokenizer asks the server, too, so that each worker has a file system of its own."""

    def tokenize(text):
        return list(fsspec.open(f"{prefix}.jsonl").open().read(5))

    inputs = [f"{prefix}.jsonl"] * 20
    one.preprocess(inputs, folder / "o", Tok(tokenize=tokenize), workers=2)


@linux
@pytest.mark.parametrize("job", [read_after_the_workers, preprocess_with_a_tokenizer_that_reads])
def test_a_forked_process_leaves_the_connections_of_its_parent(one, web, some_pair, tmp_path, job):
    """A worker that collects them takes them from the event loop, and the parent waits 300 s."""
    prefix = put(some_pair[0], web.root, web.folder)
    jsonl(web.folder / "pair.jsonl", ["1", "2"])

    def run():
        gc.set_threshold(10, 2, 2)
        job(one, prefix, tmp_path)

    assert in_child(run, timeout=60) == 0


def test_nothing_is_written_to_object_storage(one, bucket, some_pair, tmp_path, monkeypatch):
    """Caches and copies are local; a relative folder means the one in which the job started."""
    prefix = put(some_pair[0], bucket)
    (tmp_path / "elsewhere").mkdir()
    for path, place in ((None, ".cache/megatron_min"), ("idx", "idx")):
        monkeypatch.chdir(tmp_path)
        first = gpt(one, prefix, 9, object_storage_cache_path=path)
        monkeypatch.chdir(tmp_path / "elsewhere")
        pickle.loads(pickle.dumps(first))
        assert os.listdir() == []
        assert {path.suffix for path in (tmp_path / place).iterdir()} == {".idx", ""}
        assert len(list((tmp_path / place / "GPTDataset_indices").iterdir())) == 5
    cfg = config(one, ([prefix], None), path_to_cache="memory://host/folder")
    raises(ValueError, "path_to_cache must be .* local", build, one, [9, 0, 0], cfg)
    raises(FileNotFoundError, "memory://host/folder", one.merge, [prefix], "memory://host/folder/m")
    assert sorted(MEMORY.store) == ["/bucket/pair.bin", "/bucket/pair.idx"]


@pytest.mark.parametrize("name", [*"ETag blob_id sha LastModified modificationTime".split(), None])
def test_an_idx_is_copied_once_for_each_state(one, bucket, some_pair, tmp_path, monkeypatch, name):
    """If there is no state, each opening copies.  No copy stays of an .idx that changes."""

    def info(self, path, **options):
        content = self.store[self._strip_protocol(path)].getvalue()
        return {"type": "file", "size": len(content), name: hashlib.md5(content).hexdigest()}

    def copies():
        return {path: path.stat().st_mtime_ns for path in folder.iterdir()}

    monkeypatch.setattr(MEMORY, "info", info)
    prefix, docs = some_pair
    folder = tmp_path / ".cache" / "megatron_min"
    place = put(prefix, bucket)
    one.IndexedDataset(place)
    [copied] = copies()
    for damaged in (b"", bytes(40), bytes(1 << 17)):  # cut, as by a full disk, or of another size
        copied.write_bytes(damaged)
        assert lists(one.IndexedDataset(place)) == lists(docs)
    [copied] = before = copies()
    assert copied.read_bytes() == pathlib.Path(f"{prefix}.idx").read_bytes()
    one.IndexedDataset(place)
    assert (copies() == before) == (name is not None)
    changed = mk(one, tmp_path / "changed" / "pair", docs[::-1], np.uint16)  # as long
    put(changed, bucket)
    assert lists(one.IndexedDataset(place)[:]) == lists(docs[::-1])
    assert len(copies()) == (1 if name is None else 2)
    one.IndexedDataset(put(changed, "memory://other"))
    assert len(copies()) == (2 if name is None else 3)
    before = copies()
    told = [{"size": 9, "changed": time} for time in ("then", "later")]
    with mock.patch.object(one._RemoteFile, "stamp", side_effect=told):
        raises(one.DatasetFormatError, "pair.idx: .* copied", one.IndexedDataset, place)
    assert copies() == before


def test_ranges_are_exact_and_only_failed_ones_are_read_again(one, web, some_pair):
    """Each once, none for what is empty.  A server that sends the whole file is asked once."""
    ds = one.IndexedDataset(put(some_pair[0], web.root, web.folder))
    begin = int(ds.sequence_pointers[1])
    for pieces, fault, wanted in (
        ([(1, 2, 2), (1, 9, 1), (1, 2, 2), (1, 3, 0)], None, [4, 18]),
        ([(1, 2, 0)], None, []),
        ([(1, 0, 1), (1, 5, 2)], "short", [0, 10]),
        ([(1, 0, 1), (1, 5, 2)], 500, [0, 10]),
    ):
        web.requests.clear()
        web.faults = iter([fault])
        found = ds.get_many(pieces)
        assert lists(found) == [list(range(100 + i, 100 + i + n)) for _, i, n in pieces]
        ranges = [int(re.search(r"\d+", place)[0]) - begin for _, _, place in web.requests]
        assert sorted(set(ranges)) == wanted
        assert len(ranges) == len(wanted) + (fault is not None)
    web.requests.clear()
    web.faults = iter(["whole"])
    raises(OSError, r"pair\.bin: .*ignores ranges .*; copy", ds.get, 1, 2, 2)
    assert len(web.requests) == 1


def test_only_temporary_failures_are_tried_again(one, web, some_pair, no_pauses):
    """After pauses that grow.  The error names it and the object; fsspec tells of none but 404."""
    prefix = put(some_pair[0], web.root, web.folder)
    ds = one.IndexedDataset(prefix)

    def check(function, argument, kind, words, tries):
        no_pauses.clear()
        with pytest.raises(kind, match=words) as caught:
            function(argument)
        assert (caught.type, len(no_pauses) + 1) == (kind, tries)
        assert no_pauses == sorted(set(no_pauses))

    for kind, statuses, failure in (
        (OSError, [503], ConnectionResetError("by the other side")),
        (FileNotFoundError, [404, 410], FileNotFoundError("gone")),
        (PermissionError, [401, 403], PermissionError("Forbidden")),
    ):
        tries = 5 if kind is OSError else 1
        for status in statuses:
            web.faults = itertools.repeat(status)
            check(one.IndexedDataset, prefix, kind, rf"/pair\.idx: \w+: .*{prefix}", tries)
            check(ds.get, 1, kind, rf"/pair\.bin: \w+: .*{prefix}", tries)
        with mock.patch.object(ds._tokens, "_fetch_missing", side_effect=failure):
            words = rf"/pair\.bin: {type(failure).__name__}: {failure}"
            check(ds.get, 1, kind, words, tries)
    web.faults = itertools.repeat("no length")
    check(one.IndexedDataset, prefix, OSError, r"/pair\.idx: .* not report the .*size; copy", 1)


def test_which_urls_have_a_password(one):
    refused = ["s3://key:pass/word@bucket/c", "s3://KEY:SECRET", "ftp://user:@host/c"]
    refused += ["HTTPS://token@host/x", "http://user:12::x@host/x", "http://user:pw@[::1]:80/x"]
    refused += ["s3://[KEY:SECRET]@bucket/c", "simplecache::s3://KEY:SECRET@bucket/c"]
    refused += ["zip://a.jsonl::filecache::http://user@host/x.zip"]
    taken = ["s3://bucket/a:b@c", "http://host:8080/a@b", "http://[2001:db8::1]:80/x", "data/a:b@c"]
    taken += ["abfs://container@account.dfs.core.windows.net/x", "hdfs://user@host:8020/c"]
    taken += ["zip://a.jsonl::filecache::s3://bucket/x.zip", "http://[::1]/x"]
    assert [url for url in refused + taken if one._PASSWORD.search(url)] == refused


def test_a_url_that_may_hold_a_secret_is_refused(one, bucket, some_pair, tmp_path, caplog):
    """Each function that takes a path refuses it; no message, file or name has the secret."""
    local, _ = some_pair
    lines = jsonl(f"{local}.jsonl", ["1"])
    password = f"memory://k:{SECRET}/{SECRET}@b/c"
    calls = [(one.preprocess, [iter([lines, f"{password}*.jsonl"]), f"{local}.o"])]
    for url in (password, f"memory://b/c?sig={SECRET}/{SECRET}", f"simplecache::memory://{SECRET}"):
        per_split = {"blend_per_split": [None, ([local, url], [1, 2]), None], "tokenizer": Tok()}
        calls += [
            (config, [one, (local, url)]),  # no blend: the sentence that says so would show it
            (functools.partial(one.GPTDatasetConfig, 1, 8, **per_split), []),
            (one.IndexedDataset, [url]),
            (one.IndexedDatasetBuilder, [f"{url}.bin"]),
            (one.preprocess, [lines, url]),
            (one.merge, [iter([local, f"{url}_00000_of_00002"]), f"{local}.o"]),
            (one.merge, [[local], url]),
        ]
    in_bytes = os.fsencode(password)
    calls += [(config, [one, ([in_bytes], None)]), (one.IndexedDataset, [in_bytes])]
    for function, arguments in calls:
        with pytest.raises(ValueError, match="contain a .*FSSPEC|chain .*last URL") as caught:
            function(*arguments)
        assert type(caught.value) is ValueError, arguments
        assert SECRET not in str(caught.value), arguments
        assert caught.value.__cause__ is caught.value.__context__ is None
    MEMORY().pipe_file(f"/bucket/a.jsonl?{SECRET}", GOOD * 3)  # a chain with a query is an input
    made = one.preprocess(f"simplecache::{bucket}/a.jsonl?{SECRET}", tmp_path / "o")["text"]
    assert len(one.IndexedDataset(made)) == 3
    with pytest.raises(ValueError, match="prefixes") as caught:
        one.get_blend_from_list([local, password, "70"])
    assert SECRET not in str(caught.value) + caplog.text
    for path in tmp_path.rglob("*"):
        assert SECRET not in str(path)
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()


# ==============================================================================
# 17. One error for every rank
# ==============================================================================


class Panic(BaseException):
    """The package pyo3 raises such an error if code in Rust panics."""


def an_error_on_one_rank_is_raised_on_all(job):
    """If several ranks fail, the lowest one is named.  What ends a process is not sent."""
    mute = type("Mute", (Exception,), {"__str__": None})  # to ask for its words is an error
    for error, kind, words in (
        (job.mm.DatasetFormatError("a\n\udcff"), ValueError, "a\n\udcff"),
        (StopIteration("the end"), StopIteration, "the end"),
        (Panic("panicked"), RuntimeError, "panicked (Panic)"),
        (mute("a"), RuntimeError, " (Mute)"),
    ):
        for failing in range(job.world):
            mine = None
            if job.rank == failing:
                mine = error
            elif job.rank > failing + 1:
                mine = ValueError("not heard")
            with pytest.raises(BaseException) as caught:
                job.mm._call_and_wait(mock.Mock(side_effect=mine))
            if mine is not None:
                assert caught.value is mine
            else:
                assert type(caught.value) is kind
                assert str(caught.value) == f"rank {failing}: {words}"
    with counted("all_reduce") as all_reduce, counted("broadcast_object_list") as broadcast:
        assert job.mm._call_and_wait(mock.Mock(return_value=job.rank)) == job.rank
        for kind in (KeyboardInterrupt, SystemExit, GeneratorExit):
            raises(kind, None, job.mm._call_and_wait, mock.Mock(side_effect=kind))
    assert (all_reduce.call_count, broadcast.call_count) == (1, 0)


def an_error_stays_in_its_group(job):
    """The ranks of a group, of which R is the number in the whole job; alone there is no R."""
    groups = job.mm.ParallelGroups(tensor=2)
    last = job.world - 1
    step = mock.Mock(side_effect=ValueError("broken") if job.rank == last else None)
    for kind, first_told in (("tp", last - 1), ("cp", last)):
        if job.rank < first_told:
            job.mm._call_and_wait(step, groups.group(kind))
            continue
        words = "^broken$" if job.rank == last else f"^rank {last}: broken$"
        raises(ValueError, words, job.mm._call_and_wait, step, groups.group(kind))


def on_another_default_device(job):
    """Nothing that the ranks send each other is made there: some run in this way alone."""
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.device("meta"):
        job.mm.check_data_consistency(64)
        with pytest.raises(ValueError, match=f"from 64 to {63 + job.world} "):
            job.mm.check_data_consistency(64 + job.rank)
        groups = job.mm.ParallelGroups(tensor=2)
        job.mm.check_data_consistency(job.rank // 2, groups.group("tp"))
        job.mm.check_data_consistency(job.rank, groups.group("cp"))  # this rank alone
        job.mm._check_same_builds([None] * 3 if job.rank == 0 else None)
        an_error_on_one_rank_is_raised_on_all(job)
        each_rank_gets_its_part_of_a_batch(job, {"tensor": 2})
        ddp = job.mm.DistributedDataParallel(model, check_for_nan_in_grad=True)
        ddp.broadcast_params()
        ddp(torch.full((1, 2), job.rank, dtype=torch.float32, device="cpu")).sum().backward()
        job.mm.finalize_model_grads([ddp], num_tokens=1)
    assert model.weight.grad.tolist() == [[(job.world - 1) / 2] * 2]


def built_tokens(job, cache, is_built=yes, b="b"):
    """Build a blend of a and b, with a cache of this name -> each split's tokens, or None."""
    prefixes = [str(job.folder / "a"), str(job.folder / b)]
    cache = str(job.folder / cache)
    cfg = config(job.mm, (prefixes, (1, 3)), split="9,1,0", path_to_cache=cache)
    builder = job.mm.BlendedMegatronDatasetBuilder(job.mm.GPTDataset, [60, 6, 0], is_built, cfg)
    return [ds and batch_of(ds, range(len(ds)))["tokens"].tolist() for ds in builder.build()]


def caches_are_shared_or_of_ones_own(job):
    """Upstream: only global rank 0 builds, so a cache a node fails."""
    with mock.patch.object(job.mm, "build_sample_idx", wraps=job.mm.build_sample_idx) as builds:
        shared = built_tokens(job, "shared")
    assert builds.call_count == (4 if job.rank == 0 else 0), "two corpora in two splits"
    train, valid, test = shared
    assert (len(train), len(valid), test) == (60, 7, None), "7: ceil(6 / 4) + ceil(6 * 3 / 4)"
    assert built_tokens(job, "shared") == shared, "again"
    assert built_tokens(job, f"own {job.rank}") == shared
    for wanting in range(job.world):
        is_wanted = job.rank == wanting
        found = built_tokens(job, f"by {wanting}", mock.Mock(return_value=is_wanted))
        assert found == (shared if is_wanted else [None, None, None])


def a_failed_build_is_raised_on_all(job):
    """Upstream: the other ranks wait for ten minutes.  Afterwards the ranks can build again."""
    for failing in range(job.world):
        is_mine = job.rank == failing
        b = "none" if is_mine else "b"  # a file that this rank alone does not see
        words = r"none\.idx" if is_mine else rf"^rank {failing}: .*none\.idx"
        with pytest.raises(FileNotFoundError if is_mine else RuntimeError, match=words):
            built_tokens(job, f"broken {failing}", b=b)
        cannot_tell = mock.Mock(side_effect=ZeroDivisionError if is_mine else None)
        with pytest.raises(ZeroDivisionError if is_mine else RuntimeError):
            built_tokens(job, "shared", cannot_tell)
        assert built_tokens(job, "shared")[0]


def built_on_nodes(job, stale=(), weights=(1, 3), has_train=True):
    """Build on ranks of which each has a copy of its own; some of b are stale."""
    folder = job.folder / f"node {job.rank}"
    a = mk(job.mm, folder / "a", [[1] * 40])
    b = mk(job.mm, folder / "b", [[1] * 40, [2] * (30 if job.rank in stale else 33)])
    blends = [([a, b], weights) if has_train else None, ([a, b], weights), None]
    fields = {"multiple_validation_sets": True, "stable_order": True}
    return build(job.mm, [60, 6, 0], config(job.mm, blend_per_split=blends, **fields))


def the_data_of_the_ranks_are_compared(job):
    """Upstream: they train on different texts, and at the end some wait for the others."""
    with counted("broadcast_object_list") as broadcast, counted("all_gather_object") as gather:
        assert len(built_on_nodes(job)[0]) == 60
    assert (broadcast.call_count, gather.call_count) == (0, 0)
    last = job.world - 1
    for stale, others in (([last], [last]), ([0], [*range(1, job.world)])):
        words = rf"^ranks {re.escape(str(others))} .*fingerprint of corpus 1 \(b\) of train is"
        raises(ValueError, words, quiet, built_on_nodes, job, stale)
    with pytest.raises(ValueError, match="weights of train is .* on rank 0, and "):
        built_on_nodes(job, weights=(1, 2 + job.rank))
    with pytest.raises(ValueError, match=r"fingerprint of valid 1 .b. is"):
        quiet(built_on_nodes, job, [last], has_train=False)
    rows = jsonl(job.folder / f"rows {job.rank}", [ROW] * 9, "messages")
    cfg = config(job.mm, ([rows], None), tokenizer=ChatTokenizer(pad=999))
    assert len(build(job.mm, [5, 0, 0], cfg, job.mm.SFTDataset)[0]) == 5
    assert len(built_on_nodes(job)[0]) == 60, "again"


@two_or_four_ranks
def test_an_error_of_one_rank_reaches_all(tmp_path, world):
    scenarios = [an_error_stays_in_its_group, on_another_default_device]
    scenarios += [caches_are_shared_or_of_ones_own, a_failed_build_is_raised_on_all]
    scenarios.append(the_data_of_the_ranks_are_compared)
    run_on_ranks(world, tmp_path, itertools.product(scenarios))


# ==============================================================================
# 18. The C kernels
# ==============================================================================
# What the kernels compute is tested in sections 4 to 6, too; here is what needs their arguments.


@pytest.fixture(scope="session")
def c():
    """The module with the C kernels."""
    if "c" not in IMPLEMENTATIONS:
        pytest.skip("the C kernels are switched off")
    return copy_of_module("c")


NO_BUILD = "raise ModuleNotFoundError('no build')"
BUILDS = [  # what lies in the place of the C module, MEGATRON_MIN_C, what is said
    (NO_BUILD, "1", "no build"),
    (NO_BUILD, "", None),
    ("shuffle = None", "", "_megatron_min.*: expected version 2, got None"),
    ("VERSION = 3", "1", r"_megatron_min\.py: expected version 2, got 3; build it"),
    pytest.param("fused", "", "fused .*-ffp-contract=off", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("build, setting, words", BUILDS)
def test_incompatible_c_build_raises(monkeypatch, tmp_path, build, setting, words):
    """=1 asks for C, so it is an error; others go without, with a warning of what is there."""
    if build == "fused":
        build_with_fused_operations(tmp_path)
    else:
        (tmp_path / "_megatron_min.py").write_text(build)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "_megatron_min", raising=False)
    monkeypatch.setenv("MEGATRON_MIN_C", setting)
    path = str(HERE / "megatron_min.py")
    if setting == "1":
        raises(ImportError, f"{words}.*pip install", runpy.run_path, path)
        return
    module, messages = heard(runpy.run_path, path)
    assert (module["IMPLEMENTATION"], len(messages)) == ("python", words is not None)
    assert all(re.search(words, message) for message in messages)


def build_with_fused_operations(folder):
    """Build the C module by a rule of one's own: its blends would be other ones."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if not cpuinfo.exists() or " fma " not in cpuinfo.read_text():
        pytest.skip("this machine fuses no multiply-adds, or nothing says so")
    if "c" not in IMPLEMENTATIONS or not (HERE / "_helpers.c").exists():
        pytest.skip("there is no C compiler, or nothing to compile")
    command = shlex.split(sysconfig.get_config_var("CC")) + ["-O3", "-mfma", "-ffp-contract=fast"]
    command += ["-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", HERE / "_helpers.c"]
    subprocess.run([*command, "-o", folder / "_megatron_min.abi3.so"], check=True)


# -- C gives what the definitions give ---------------------------------------------------------


@linux
def test_shuffle_of_more_than_2_32_items_uses_numpy(c, tmp_path):
    """There a draw is two words.  The file has a hole of this size."""
    items = np.memmap(tmp_path / "a", "i4", "w+", shape=2**32 + 1)
    assert is_refused(c, "shuffle", toy_call(c, "shuffle") | {"array": items})


@pytest.mark.parametrize("dtype", ["i4", "u4", "i8"])
def test_shuffle_continues_as_numpy_would(c, dtype):
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


def test_c_is_used_where_possible(c, toy, monkeypatch):
    """Else all would be right, and ten times slower."""
    monkeypatch.setattr(c, "_MIN_ITEMS_FOR_C", 0)
    for name in ("_make_batch", "_fill_blend", "_fill_rows", "shuffle"):
        monkeypatch.setattr(getattr(c, name), "__wrapped__", None)
    monkeypatch.setattr(c.GPTDataset.__getitem__, "__wrapped__", None)
    for fields in ({"tokenizer": Tok(eod=None)}, DOCUMENTS, WITH_MASK | RESETS):
        for size, weights in ((6, [1, 2]), (None, None)):
            blend = build(c, [size, 0, 0], config(c, ([toy] * 2, weights), **fields))[0]
            c._make_batch(blend, [0, None])
            assert len(blend[0]["tokens"]) == 8


@pytest.mark.slow
def test_c_looks_at_few_lags_for_each_sample(c):
    """It takes 5 times as long for 64 times the datasets.  Upstream looks at all of them."""
    outputs = np.zeros(100_000, np.int16), np.zeros(100_000, np.int64)
    times = {64: [], 4096: []}
    for n in 5 * list(times):
        weights = np.random.default_rng(n).dirichlet(np.ones(n))
        begin = time.process_time()
        c.build_blending_indices(*outputs, weights, n, 100_000)
        times[n].append(time.process_time() - begin)
    assert min(times[4096]) < 15 * min(times[64])


def test_what_c_cannot_read_is_left_to_the_definition(mm, toy):
    """A reader of one's own, of which C would read the file; a large id; a batch of no sample."""

    class Plus(mm.IndexedDataset):
        def get(self, *arguments):
            return super().get(*arguments) + 1

    own = gpt(mm, toy, 3, sequence_length=4)
    own.config.add_extra_token_to_sequence = False  # it was built with the other setting
    own.dataset = Plus(toy)
    pair = mm.IndexedDataset(toy)
    least = types.SimpleNamespace(sequence_lengths=pair.sequence_lengths, get=Plus(toy).get)
    large = gpt(mm, toy, 3, sequence_length=4, tokenizer=Tok(eod=2**63))
    for ds, k, wanted in ((own, 0, b"cccd"), (large, 1, b"cccc")):
        for [sample] in read_in_all_ways(ds, [k]):
            assert bytes(sample["tokens"].tolist()) == wanted
    for own.dataset, wanted in ((least, b"ccdd"), (pair, b"bbcc")):  # no roll of tokens
        for [sample] in read_in_all_ways(own, [0]):
            assert bytes(sample["labels"].tolist()) == wanted
    raises(IndexError, None, batch_of, own, [])


# -- arguments in all forms: C takes and refuses what the definition does -----------------------

BLEND = [np.zeros(4, np.int16), np.zeros(4, np.int64)]  # that is filled
ARGUMENTS = {  # {function: good arguments, in order}
    "build_sample_idx": [int32(4, 3, 6), int32(0, 1, 2), 4, 1, 13, True, True],
    "shuffle": [np.arange(9), np.random.RandomState(3)],
    "build_blending_indices": [*BLEND, np.array([0.25, 0.75]), 2, 4],
    "build_exhaustive_blending_indices": [*BLEND, np.array([1, 3]), 2],
}
HOSTILE = {  # {argument: what is refused}; upstream crashes at many of them
    "dataset_index": [array.array("h", [0] * 4), np.zeros(4, np.int32), np.zeros(3, np.int16)],
    "dataset_sample_index": [np.zeros((4, 1), np.int64), b"\0" * 32],
    "weights": [[0.5, math.nan], [0.5, math.inf], [0.5, -0.5], [1.0], ["a", "b"], 1.0],
    "num_datasets": [0, 3, -1],
    "size": [5, 2.5, 4.0, 2**70],
    "sizes": [[4], np.array([2.5, 1.5]), [5, -1], [2**62, 2**62], 4],
}


def other_forms(value):
    """A good argument as something else, which may be taken or refused."""
    if isinstance(value, np.ndarray):
        forms = [*wrong_forms(value), value[::-1], value[:-1], value[0], value.tolist()]
        forms += [np.broadcast_to(value, value.shape), memoryview(value), torch.from_numpy(value)]
        return [*forms, bytes(value), value.astype(float), value > 0, None]
    if isinstance(value, np.random.RandomState):
        return [np.random.RandomState(np.random.PCG64(3)), np.random.default_rng(3), 3, None]
    forms = [float(value), str(value), np.int64(value), np.uint8(value), np.array(value)]
    return [*forms, torch.tensor(value), value > 0, -value, 0, 2, 2**63, None]


def good_arguments(name):
    """Arguments of a function, made anew."""
    names = inspect.signature(getattr(copy_of_module("python"), name)).parameters
    return dict(zip(names, copy.deepcopy(ARGUMENTS[name]), strict=False))


def odd_calls(name):
    """Calls with an argument, or two, in other forms -> (call, has it to be refused?)."""
    for argument, value in good_arguments(name).items():
        hostile = HOSTILE[argument] if "blend" in name else []
        for number, other in enumerate([*hostile, *other_forms(value)]):
            yield good_arguments(name) | {argument: other}, number < len(hostile)
    if "blend" in name:
        a, b = overlapping(*BLEND)
        yield good_arguments(name) | {"dataset_index": a, "dataset_sample_index": b}, False


def outcome(mm, name, call):
    """What a function returns, or its error; and what its arrays then hold."""
    try:
        result = quiet(getattr(mm, name), **call)
    except Exception as error:
        result = type(error), str(error)
    held = [list(value) for value in call.values() if np.ndim(value)]
    return repr((result, held))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_c_takes_is_what_the_definition_takes(c, one, name, monkeypatch):
    """The same result, or the same error with the same sentence."""
    monkeypatch.setattr(c, "_MIN_ITEMS_FOR_C", 0)
    for module in (c, one):  # rows of 64 bits, as a stream of 2**31 documents has them
        monkeypatch.setattr(module, "_sample_index_dtype", mock.Mock(return_value=np.int64))
    for (ours, is_refused), (plain, _) in zip(odd_calls(name), odd_calls(name), strict=True):
        found = outcome(c, name, ours)
        assert found == outcome(one, name, plain), plain
        if is_refused:
            assert re.match(r"\(\(<class '(Type|Value|Index)Error'>", found), plain


# -- what a function of C is given is checked before it is trusted -----------------------------
#
# A call is the arguments of a function of _megatron_min, by name and in order.

READ = [np.zeros((3, 4), dtype) for dtype in ("i8", "i8", "f4", "i8")]  # tokens .. position_ids
READ += [np.zeros((3, 5), np.int32), np.zeros(3, np.int32)]  # cu_seqlens, max_seqlen
READ += [np.zeros((3, 1, 4, 4), bool), np.arange(3), np.array([0, -2, 2])]  # .. sample_numbers
READ += [int32(*b"aaaabbbcccccc"), np.array([0, 16, 28])]  # items, pointers
READ += ARGUMENTS["build_sample_idx"][:2]  # lengths, document_index
READ += [np.array([[0, 0], [1, 0], [2, 1], [2, 5]]), np.arange(3)]  # sample_index, shuffle_index
READ += [1, -1, 0, True, True, True]  # extra, pad, eod, by_eod, mask_loss, reset_mask
CALLS = {  # {function: how many arrays it fills, good arguments}: the toy corpus, or two datasets
    "build_sample_idx": (1, [np.zeros((4, 2), "i4"), *ARGUMENTS["build_sample_idx"][:3], 1, 13]),
    "shuffle": (2, [np.arange(9), np.random.RandomState(0).get_state()[1], 600]),
    "build_blend": (2, [*BLEND, np.array([0.25, 0.75]), np.array([1.0, 3.0]), 4]),
    "read_samples": (7, READ),
}


def toy_call(c, name):
    """A good call.  In front and behind each array lies an item, which would do as one more."""
    names = inspect.signature(getattr(c._megatron_min, name)).parameters  # as help() shows them
    call = {}
    for key, value in zip(names, CALLS[name][1], strict=True):
        is_array = isinstance(value, np.ndarray)
        call[key] = np.concatenate([value[:1], value, value[-1:]])[1:-1] if is_array else value
    return call


def is_refused(c, name, call):
    """Does a function of C raise an error, or return that an index is out of range?"""
    try:
        return getattr(c._megatron_min, name)(*call.values()) is False
    except (TypeError, ValueError, OverflowError):
        return True


WRONG = {  # {function: {argument: values that it refuses in the toy call}}
    "build_sample_idx": {
        "sample_index": [np.zeros((4, 3), np.int32), np.zeros((0, 2), np.int32)],
        "document_index": [int32(0, 3, 2), int32(-1, 1, 2), int32(0, 1)],
        "sequence_length": [0, 2**62, 2**63],
        "add_extra_token": [-1, 2],
        "last_token": [9, 14],  # of the row before, and of the next
    },
    "shuffle": {"pos": [-1, 625, 2**31], "array": [b"01234567", None]},
    "build_blend": {
        "size": [-1, 5],
        "weights": [np.array([0.5, math.nan]), np.array([0.5, math.inf]), np.array([-0.5, 1])],
        "limits": [np.array([1.0, 2.0]), np.array([math.nan, 4.0])],
    },
    "read_samples": {
        "tokens": [None, np.zeros((3, 0), np.int64)],
        "cu_seqlens": [None],  # without max_seqlen, and that without this
        "max_seqlen": [None],
        "rows": [np.array([0, 1]), np.arange(4), np.array([0, 1, 3]), np.array([-1, 1, 2])],
        "sample_numbers": [np.array([0, 1, 3]), np.array([0, 1, -4])],
        "items": [np.zeros(13, np.uint32), np.zeros(13, np.float32), "aaaabbb"],
        "pointers": [np.array([0, 16])],
        "sample_index": [np.zeros((4, 3), np.int64)],
        "shuffle_index": [int32(0, 1, 2), np.array([3, 1, 2]), np.array([-1, 1, 2])],
        "extra": [-1, 2],
        "pad": [2**63],
    },
}
OUT_OF_RANGE = [  # (the one sample that is read, array, values that lead it out of range)
    (1, "sample_index", [[0, 0], [1, 0], [2, 2**32], [2, 5]]),
    (2, "sample_index", [[0, 0], [1, 0], [2, 2], [2, 6]]),  # ends behind a document
    (0, "pointers", [-4, 16, 28]),
    (2, "pointers", [0, 16, 32]),
    (2, "pointers", [0, 16, 26]),  # in the middle of a token
    (0, "lengths", [-1, 3, 6]),
]  # section 5 has more: wrong entries of arrays


def wrong_forms(values):
    """What no function of C takes in place of an array: other dtypes, axes, gaps, byte orders."""
    forms = [values.astype("O"), values.astype("u8"), values[None]]
    forms.append(np.repeat(values, 2, axis=-1)[..., ::2])
    if values.itemsize > 1:
        forms.append(values.astype(values.dtype.newbyteorder()))
    return forms


def overlapping(values, others):
    """Two arrays like these, of which the last byte of one is the first of the other."""
    memory = np.zeros(values.nbytes + others.nbytes - 1, np.uint8)
    first = np.ndarray(values.shape, values.dtype, memory)
    return first, np.ndarray(others.shape, others.dtype, memory, values.nbytes - 1)


def refused_changes(name, usual):
    """Changes of the toy call, of an argument or two, that a function of C has to refuse."""
    arrays = {key: value for key, value in usual.items() if isinstance(value, np.ndarray)}
    filled = list(usual)[: CALLS[name][0]]
    for key, value in usual.items():
        wrong = list(WRONG[name].get(key, []))
        if key in arrays:
            wrong += wrong_forms(value)
        elif type(value) is int:
            wrong += [None, "4", 1.5]
        if key in filled:
            wrong.append(np.broadcast_to(value, value.shape))  # it is read-only
            if key != "array":  # any array may be shuffled
                wrong += [np.delete(value, -1, axis) for axis in range(value.ndim)]
            for other in arrays.keys() - {key}:
                a, b = overlapping(value, arrays[other])
                yield {key: a, other: b}
        yield from [{key: one_of_them} for one_of_them in wrong]
    if name == "read_samples":
        for k, key, values in OUT_OF_RANGE:
            some = {"rows": np.array([0]), "sample_numbers": np.array([k])}
            yield some | {key: np.array(values, usual[key].dtype)}


@pytest.mark.parametrize("name", CALLS)
def test_c_refuses_bad_calls(c, name):
    """It gives back what it has borrowed, as after a good call."""
    usual = toy_call(c, name)
    for change in ({}, *refused_changes(name, usual)):
        call = toy_call(c, name) | change
        arrays = [value for value in call.values() if isinstance(value, np.ndarray)]
        counts = [sys.getrefcount(values) for values in arrays]
        assert is_refused(c, name, call) == (change != {}), change
        assert [sys.getrefcount(values) for values in arrays] == counts, change


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_c_releases_the_gil(c, name):
    """Another thread ends while this one does nothing but call."""
    thread = threading.Thread(target=time.sleep, args=[0.001])
    call = toy_call(c, name)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # only a lock that is released lets the other thread in
    thread.start()
    for _ in range(1_000_000):  # a call is short, and the system may wake the thread late
        if thread.is_alive():
            is_refused(c, name, call)
    is_released = not thread.is_alive()
    sys.setswitchinterval(before)
    assert is_released


# -- what setup.py builds and packs ------------------------------------------------------------


def run_setup(folder, *words, **variables):
    """Run setup.py in a folder with these environment variables, and without a network."""
    environment = os.environ | {"MEGATRON_MIN_C": "", "MEGATRON_MIN_CFLAGS": ""} | variables
    run = [sys.executable, "-W", "ignore", "setup.py", "-q", *words]
    subprocess.run(run, cwd=folder, env=environment, check=True, capture_output=True)


FAST = "-ffp-contract=fast -march=native"  # of two operations on doubles one may be made
WHEELS = {  # {why: (environment, the tag of the wheel; with C required, what an error says)}
    "not wanted": ({"MEGATRON_MIN_C": "0"}, "py3-none-any"),
    "no compiler": ({"CC": "false"}, "py3-none-any"),
    "C": ({"MEGATRON_MIN_C": "1", "MEGATRON_MIN_CFLAGS": FAST}, "cp311-abi3-"),
    "C without a compiler": ({"MEGATRON_MIN_C": "1", "CC": "false"}, "'false'"),
    "flags that C refuses": ({"MEGATRON_MIN_CFLAGS": "-ffast-math"}, "#error"),
}


@pytest.mark.slow
def test_wheels_of_the_sources_as_they_are_packed(tmp_path, monkeypatch):
    """Without C a wheel is pure; if C is required, or flags are given, that is an error."""
    if not (HERE / "setup.py").exists():
        pytest.skip("setup.py is not beside this file")
    copied = tmp_path / "sources"
    shutil.copytree(HERE, copied, ignore=shutil.ignore_patterns("*.so", "build", "dist", ".git"))
    # setuptools before 70.1 has no bdist_wheel, and pip may be told to build with what is there
    code = "import runpy, sys; sys.modules['setuptools.command.bdist_wheel'] = None\n"
    code += f"sys.argv = ['setup.py', '-q', 'build', '--build-base', {str(tmp_path)!r}]\n"
    code += "runpy.run_path('setup.py')"
    pure = os.environ | {"MEGATRON_MIN_C": "0"}
    subprocess.run([sys.executable, "-c", code], cwd=copied, env=pure, check=True)
    assert (tmp_path / "lib" / "megatron_min.py").exists()
    pytest.importorskip("setuptools.command.bdist_wheel", reason="setuptools is before 70.1")
    run_setup(copied, "sdist")
    [archive] = (copied / "dist").iterdir()
    for case, (variables, words) in WHEELS.items():
        if "c" not in IMPLEMENTATIONS and case in ("C", "flags that C refuses"):
            continue  # there is no C compiler
        shutil.unpack_archive(archive, tmp_path / case)
        [folder] = (tmp_path / case).iterdir()
        if words in ("'false'", "#error"):
            with pytest.raises(subprocess.CalledProcessError) as error:
                run_setup(folder, "bdist_wheel", **variables)
            assert words in error.value.stderr.decode()
            continue
        run_setup(folder, "bdist_wheel", **variables)
        [wheel] = (folder / "dist").iterdir()
        assert words in wheel.name
        installed = folder / "installed"
        zipfile.ZipFile(wheel).extractall(installed)
        assert len(list(installed.glob("_megatron_min.*"))) == (case == "C")
        if case == "C":
            monkeypatch.syspath_prepend(installed)
            monkeypatch.delitem(sys.modules, "_megatron_min", raising=False)
            module = runpy.run_path(str(installed / "megatron_min.py"))
            assert module["IMPLEMENTATION"] == "c"
            test_blends_by_a_loop(types.SimpleNamespace(**module))


def test_the_benchmark(tmp_path, monkeypatch, capsys):
    """It compares each batch and both files, and restores the environment and the warnings."""
    if not (HERE / "bench.py").exists():
        pytest.skip("bench.py is not beside this file")
    monkeypatch.setitem(sys.modules, "megatron.core.datasets", None)
    for name in ("Python", "C"):
        monkeypatch.setitem(sys.modules, name, None)  # so they are not left there
    before = dict(os.environ), warnings.filters[:]
    bench = types.SimpleNamespace(**runpy.run_path(str(HERE / "bench.py")))
    ours = bench.competitors()["Python"]
    assert capsys.readouterr().out.startswith("No column for upstream, so")
    assert (dict(os.environ), warnings.filters) == before
    traced = []

    def build_dataset(mm, prefix, num_samples):
        os.makedirs(prefix, exist_ok=True)
        traced.append(tracemalloc.is_tracing())

    lines = jsonl(tmp_path / "a", ["1", "23"])
    for name, function in (
        ("dataset_to_read", mock.Mock(return_value=Numbers(40))),
        ("text_and_tokenizer", mock.Mock(return_value=(lines, "bytes"))),
        ("corpus", mock.Mock(return_value=str(tmp_path / "corpus"))),
        ("build_dataset", build_dataset),
    ):
        monkeypatch.setitem(bench.loader.__globals__, name, function)
    batches = list(bench.loader(ours, 32))
    assert [batch["k"].tolist() for batch in batches] == np.arange(40).reshape(5, 8).tolist()
    assert bench.is_same(bench.loader(ours, 32), iter(batches))
    batches[2] = batches[1]
    assert not bench.is_same(bench.loader(ours, 32), iter(batches))
    assert bench.preprocess(ours, 2) == bytes_of_pair(f"{bench.HOME}/text_text_document")
    bench.print_sizes()
    assert traced[:3] == [False, False, True]


# ==============================================================================
# 19. Tokenizers
# ==============================================================================


def test_tokenizer_by_module_and_attribute(one, tmp_path, monkeypatch):
    """The current folder is searched first; then it is the last one, for worker processes, too."""
    lines = "object = Tok()\ndef make(): return object\ntext = ''\n"
    (tmp_path / "my_tokens.py").write_text(f"from {__name__} import Tok\n{lines}")
    (tmp_path / "zipapp.py").write_text((tmp_path / "my_tokens.py").read_text())  # and Python's
    (tmp_path / "no_tokens.py").write_text("import no_module")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "zipapp", raising=False)
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    for name, words in (
        ("no_tokens:Tok", "No module named 'no_module'"),
        ("my_tokens:none", "has no attribute 'none'"),
    ):
        raises(ImportError, f"^tokenizer '{name}': .*{words}", one.build_tokenizer, name)
    with pytest.raises(ValueError, match=r"^tokenizer 'json:dumps': TypeError: dumps\(\)"):
        one.build_tokenizer("json:dumps")
    assert sys.path == before
    for attribute in ("Tok", "object", "make"):
        assert one.build_tokenizer(f"my_tokens:{attribute}").tokenize("7 8") == [7, 8]
    raises(ValueError, "an object, got a str", one.build_tokenizer, "my_tokens:text")
    assert one.build_tokenizer("zipapp:Tok").tokenize("7 8") == [7, 8]
    del sys.modules["zipapp"]
    assert sys.path == [*before, str(tmp_path)]


@pytest.fixture
def hf(tmp_path):
    """A tokenizer.json of words, with a gap in its ids; if asked, </s> goes in front of a text."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "ja": 1, "nein": 2, "<|endoftext|>": 3, "</s>": 4, "weit": 70_000}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>", "</s>"])
    template = tokenizers.processors.TemplateProcessing
    tokenizer.post_processor = template(single="</s> $A", special_tokens=[("</s>", 4)])
    tokenizer.enable_truncation(2)  # as models that read one text want it
    tokenizer.enable_padding(length=3)
    path = str(tmp_path / "tokenizer.json")
    tokenizer.save(path)
    return path


def test_hugging_face_tokenizer(one, hf):
    """Upstream counts the ids, 6 here: the file would get two bytes for an id of 70,000."""
    texts = ["nein ja ja", "", "was", "weit"]
    of_file = {"class": "HuggingFaceTokenizer", "package": "tokenizers"}
    of_file["tokenizer.json"] = hashlib.md5(pathlib.Path(hf).read_bytes()).hexdigest()
    for arguments, start, identifiers in (
        ([hf], [], {"eod": 3}),
        ([hf, "</s>", True], [4], {"eod": 4, "add_special_tokens": True}),  # as Llama's file has it
    ):
        tokenizer = one.build_tokenizer(*arguments)
        wanted = [[*start, 2, 1, 1], start, [*start, 0], [*start, 70_000]]
        assert [tokenizer.tokenize(text) for text in texts] == wanted
        assert lists(tokenizer.tokenize_batch(texts)) == wanted
        assert tokenizer.unique_identifiers == of_file | identifiers


def test_the_eod_of_a_folder(one, tmp_path, hf):
    """Its eos_token, in the two forms that it has, unless another one is asked for."""
    for content, eod, words in (
        ('{"eos_token": null}', 3, None),
        ('{"eos_token": "ja"}', 1, None),
        ('{"eos_token": {"content": "ja", "lstrip": false}}', 1, None),
        ('{"eos_token": {"text": "ja"}}', None, "tokenizer_config.json: .*content"),
        ('{"eos_token": 12}', None, "tokenizer.json: it has no token 12; .*--eod-token"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with refusal(words):
            assert one.build_tokenizer(tmp_path).eod == eod
        assert one.build_tokenizer(tmp_path, "nein").eod == 2
        assert one.build_tokenizer(hf).eod == 3, "a bare file as ever"


def test_unusable_tokenizer_raises(one, tmp_path, hf, monkeypatch):
    """The error has the name of what is wrong."""
    pytest.importorskip("gigatoken")
    (tmp_path / "no.json").write_text('{"a": 1}')
    (tmp_path / "no.model").touch()
    monkeypatch.chdir(tmp_path)
    for name, eod_text, adds_special_tokens, words in (
        ("no.json", None, False, r"no\.json: cannot be read as a tokenizer\.json"),
        (f"gigatoken:{hf}", None, False, r"tokenizer\.json: .* by gigatoken .leave out .*: "),
        (f"gigatoken:{hf}", None, True, "json: add_special_tokens .*; leave out .gigatoken:"),
        ("null:9", "</s>", False, "null:9: eod_token .* need a tokenizer.json"),
        ("null:x", None, False, "unknown tokenizer 'null:x'"),
        ("no.model", None, False, "unknown tokenizer 'no.model'"),
    ):
        raises(ValueError, words, one.build_tokenizer, name, eod_text, adds_special_tokens)
    for name in ("tokenizer", "gigatoken:a/b.json", tmp_path / "byte"):
        words = rf"^{str(name).removeprefix('gigatoken:')}: .*bytes, null:N"
        raises(FileNotFoundError, words, one.build_tokenizer, name, "</s>")


def test_a_package_that_is_missing_is_named(one, tmp_path, hf, monkeypatch):
    """No extra of megatron-min is named: a copied module has none."""
    job = {"texts": ["a"], "output_prefix": tmp_path / "o"}
    for module, use in {
        "gigatoken": functools.partial(one.build_tokenizer, f"gigatoken:{hf}"),
        "tokenizers": functools.partial(one.build_tokenizer, hf),
        "nltk.tokenize.punkt": functools.partial(one.preprocess, **job, split_sentences=True),
        "pyarrow.parquet": functools.partial(chat, one, jsonl(tmp_path / "a.parquet", [])),
    }.items():
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
        package = module.partition(".")[0]
        raises(ImportError, rf"needs the package {package} \(pip install {package}\): ", use)


def test_text_and_ids_of_all_kinds(one, hf):
    """Ids may be lists, arrays, tensors, and what can be read only once."""
    ids = [1, 3, 1]
    for name, eod, vocab_size, text in (
        ("bytes", 256, 257, "\x01\x03\x01"),
        ("null:300", 300, 301, "1 3 1"),
        (hf, 3, 70_001, "ja <|endoftext|> ja"),
    ):
        tokenizer = one.build_tokenizer(name)
        assert (tokenizer.eod, tokenizer.vocab_size) == (eod, vocab_size)
        assert tokenizer.tokenize(text) == ids
        for given in (ids, np.array(ids, np.uint16), torch.tensor(ids), iter(torch.tensor(ids))):
            assert tokenizer.detokenize(given) == text
        assert tokenizer.detokenize([]) == tokenizer.detokenize(torch.tensor([])) == ""
        raises(TypeError, None, tokenizer.detokenize, torch.tensor([1.0]))  # such as a loss mask
    for text, word in (("1 301", "301"), ("-1", "-1"), ("1 a", "a")):
        with pytest.raises(ValueError, match=f"null:N: expected ids from 0 to 300, got '{word}'"):
            one.build_tokenizer("null:300").tokenize(text)


PIECES = ["the", " the", "The", " ", "\n", "\r\n", "\t", "12345", "don't", "é", "e\u0301", "日本"]
PIECES += ["ﬁ", "🙂", "👩\u200d🚀", "\u2028", "\x00", "\ufeff", "\U0010ffff", "}}", "<|endoftext|>"]


def odd_texts(rng, count):
    """Texts of odd pieces, put together at random; the first one is empty."""
    return [""] + ["".join(rng.choice(PIECES, rng.integers(1, 30))) for _ in range(count)]


def test_gigatoken_makes_the_ids_of_tokenizers(one, tmp_path, monkeypatch):
    """It is made anew after much text, and after unpickling, without a second probe."""
    pytest.importorskip("gigatoken")
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|im_end|>"]
    trained.train_from_iterator(["the 12"], 261, min_frequency=1, special_tokens=special)
    trained.save(str(tmp_path / "tokenizer.json"))
    texts = odd_texts(np.random.default_rng(0), 300)
    slow = one.build_tokenizer(tmp_path, "<|im_end|>")
    fast = one.build_tokenizer(f"gigatoken:{tmp_path}", "<|im_end|>")
    ids = [slow.tokenize(text) for text in texts]
    assert fast.unique_identifiers == slow.unique_identifiers | {"package": "gigatoken"}
    assert fast.tokenize(texts[1]) == ids[1]
    assert lists(fast.tokenize_batch([])) == []
    made = one.preprocess(texts=texts, output_prefix=tmp_path / "o", tokenizer=fast, workers=2)
    assert texts_of(one, made["text"]) == ids
    fast._RESET_AFTER_BYTES = 0
    monkeypatch.setattr(one.HuggingFaceTokenizer, "tokenize", None)
    for tokenizer in (fast, pickle.loads(pickle.dumps(fast))):
        before = tokenizer._gigatoken
        assert lists(tokenizer.tokenize_batch(texts)) == ids
        assert tokenizer._gigatoken not in (before, None)


LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
LLAMA_3 += r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def test_gigatoken_refuses_a_file_if_its_ids_would_differ(one, tmp_path):
    """Such as one with merges over words, and one with an added token that is a word alone."""
    pytest.importorskip("gigatoken")
    tokenizers = pytest.importorskip("tokenizers")
    bytes_alone = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(LLAMA_3), "isolated")
    llama_3 = tokenizers.pre_tokenizers.Sequence([words, bytes_alone])
    reserved = [tokenizers.AddedToken(f"<|reserved_{k}|>", special=True) for k in range(300)]
    word = tokenizers.AddedToken("qq", single_word=True)
    path = tmp_path / "tokenizer.json"
    for pre_tokenizer, text, added, differs in (
        (llama_3, "the cat, the hat", [*reserved, "qq"], None),
        (bytes_alone, "the cat, the hat", [], "the|cat"),
        (bytes_alone, "j q j q", [], "j "),  # in no line of the probe
        (llama_3, "the cat", [*reserved, word], "aqqb"),
    ):
        tokenizer = tokenizers.ByteLevelBPETokenizer()
        tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.train_from_iterator([text] * 9, show_progress=False, special_tokens=["</s>"])
        tokenizer.add_tokens(added)
        tokenizer.save(str(path))
        with refusal(differs and f"^{path}: .*({differs}).* leave out .gigatoken:"):
            found = one.build_tokenizer(f"gigatoken:{path}").tokenize(text)
            assert found == one.build_tokenizer(path).tokenize(text)


# ==============================================================================
# 20. Preprocessing
# ==============================================================================


GOOD = b'{"text": "1"}\n'  # a line that every tokenizer of this section takes


def compress(content, extension):
    """Content as two whole compressed files, laid end to end."""
    if extension == "":
        return content
    module = pytest.importorskip({".gz": "gzip", ".zst": ZSTD}[extension])
    half = len(content) // 2
    return module.compress(content[:half]) + module.compress(content[half:])


# -- Shards ------------------------------------------------------------------------------------


def make_shards(one, inputs, folder, count, **arguments):
    """Make all shards, and merge them -> the prefix of the merged pair."""
    job = {"input": inputs, "output_prefix": folder / "s"} | arguments
    shards = [one.preprocess(shard=(index, count), **job)["text"] for index in range(count)]
    assert shards == sorted(set(shards))
    one.merge(shards, folder / "merged")
    return folder / "merged"


def random_input(rng):
    """Up to 30 lines that are good: of odd texts, of all forms, or blank."""
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in odd_texts(rng, 15)]
    lines = [*LINES_OF_TEXT.split(b"\n"), *map(str.encode, rows)]
    return b"\n".join(rng.choice(lines, rng.integers(31)))


def test_random_corpora_equal_the_plain_loop(one, tmp_path, monkeypatch):
    """By 1 to 3 workers, and as 2 to 5 shards, which are merged; with blocks of all sizes."""
    for case, rng in enumerate(cases(3)):
        monkeypatch.setattr(one, "_BLOCK_BYTES", int(rng.choice([1, 100, 5000, 1 << 19])))
        contents = [random_input(rng) for _ in range(rng.integers(1, 6))]
        paths = []
        for number, content in enumerate(contents):
            extension = str(rng.choice(["", "", ".gz"]))
            paths.append(tmp_path / f"{number}.jsonl{extension}")
            paths[-1].write_bytes(compress(content, extension))
        (tmp_path / "all").write_bytes(b"\n".join(contents))
        one.encode_jsonl(tmp_path / "all", tmp_path / "plain", append_eod=True)
        job = {"append_eod": True, "workers": case % 3 + 1}
        whole = quiet(one.preprocess, paths, tmp_path / "o", **job)["text"]
        count = int(rng.integers(2, 6))
        merged = quiet(make_shards, one, paths, tmp_path, count, append_eod=True)
        assert bytes_of_pair(whole) == bytes_of_pair(merged) == bytes_of_pair(tmp_path / "plain")


def test_an_input_is_of_the_shard_in_whose_share_it_begins(one):
    """A warning says if shards are very unequal."""
    for sizes, wanted, num_filled in (
        ([22, 9, 16, 19], [[22], [9, 16], [19]], None),
        ([5, 0, 5, 0], [[5], [0, 5, 0]], None),  # the third begins where a share does
        ([1, 2, 3], [[1, 2, 3]], None),
        ([1, 7, 1], [[1, 7], [], [1]], 2),
        ([2, 8, 1], [[2, 8], [1]], 2),  # both have an input, and one of these is too large
        ([0, 0], [[0, 0], [], []], 1),
    ):
        inputs = [one._Input("a", size) for size in sizes]
        words = rf"the shards are unequal .{num_filled} of {len(wanted)} .*split -n l/16"
        for index, shard in enumerate(wanted):
            found, messages = heard(one._inputs_of_shard, inputs, index, len(wanted))
            assert [each.file_size for each in found] == shard
            assert len(messages) == (num_filled is not None)
            assert all(re.match(words, message) for message in messages)


def test_all_shards_of_a_job_are_merged_or_none(one, tmp_path, monkeypatch):
    """In order, in whatever folders; of the same inputs and append_eod, as far as records tell."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 9), ("b", 9), ("n0/b", 9), ("n1/b", 10)):
        os.makedirs(os.path.dirname(tmp_path / name), exist_ok=True)
        jsonl(f"{name}.jsonl", ["1"] * count)
    assert len(one.IndexedDataset(one.preprocess("**/*.jsonl", "o")["text"])) == 37
    first = one.preprocess(["a.jsonl", "b.jsonl"], "o", shard=(0, 2))["text"]
    refused = pytest.raises(ValueError, match="_00001_of_00002: not from the same job .*append_eod")
    for names, append_eod, outcome in (
        ("a n1/b", False, refused),  # a file that has grown
        ("a b", True, refused),
        ("a n0/b", False, contextlib.nullcontext()),
    ):
        inputs = [f"{tmp_path}/{name}.jsonl" for name in names.split()]
        job = {"append_eod": append_eod, "shard": (1, 2)}
        second = quiet(one.preprocess, inputs, "o", **job)["text"]
        with outcome:
            one.merge([first, second], "merged")
    path = pathlib.Path(f"{second}.record.json")
    path.write_text(re.sub(r',\s+"job": "\w+"', "", path.read_text()))
    with refused:
        one.merge([first, second], "merged")
    path.write_text(path.read_text().replace('"bin": ', '"bin": 9'))  # of another pair
    mk(one, tmp_path / "s_100000_of_100001", [[1]])
    for prefixes, missing in (
        ([], "at least one"),
        ([first], "text_document_00001_of_00002, got the end of the list; merge all 2 shards"),
        ([second, first], f"expected {first}, got {second}; merge all 2 shards"),
        ([first, second, "none"], r"none\.idx"),
        ([first, second], r"00001_of_00002: .*copy its \.record\.json.* rename"),
        (["s_100000_of_100001"], "expected s_00000_of_100001, got s_100000_of_100001"),
    ):
        raises((ValueError, OSError), missing, one.merge, prefixes, "all")
    assert glob.glob("all*") == []
    second = quiet(one.preprocess, ["a.jsonl", "b.jsonl"], "o", shard=(1, 2))["text"]
    others = [quiet(one.preprocess, "a.jsonl", f"n{k}/p", shard=(k, 2))["text"] for k in range(2)]
    one.merge([first, second, *others, first, second, "merged"], "all")
    assert len(one.IndexedDataset("all")) == 63


# -- Records -----------------------------------------------------------------------------------


def inputs_of(one, prefix):
    """[(name of the input, number in there)] of the documents of a pair that have tokens."""
    tokens = int(one.IndexedDataset(prefix).sequence_lengths.sum())
    ds = gpt(one, prefix, sequence_length=tokens - 1, tokenizer=one.ByteTokenizer())
    _, spans = one.trace(ds, 0), one.trace(ds, 0)  # each of them, and its record is read once
    return [(span.input, span.input_document) for span in sorted(spans)]


def test_the_way_back_to_the_inputs(one, tmp_path, monkeypatch):
    """Jobs, shards and merged pairs have it; bad lines count.  A record is read once for a pair."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 1), ("b", 0), ("c", 29), ("d", 6)):
        jsonl(f"{name}.jsonl", [f"{name}{k}" for k in range(count)])
    for place in (34, 68):
        patch("c.jsonl", place, b"oops")
    whole = quiet(one.preprocess, "*.jsonl", "whole", on_error="skip")["text"]
    assert texts_of(one, whole).count([]) == 2
    merged = quiet(make_shards, one, "*.jsonl", tmp_path, 3, on_error="skip")
    one.merge([merged, whole, merged], "all")
    first, empty, last = sorted(path.removesuffix(".idx") for path in glob.glob("s_*.idx"))
    assert texts_of(one, empty) == []  # no input begins in the second of three shares
    for prefix in (whole, first, last, merged, "all"):
        texts = [bytes(ids).decode() for ids in texts_of(one, prefix) if len(ids) > 0]
        with mock.patch.object(one, "_make_record", wraps=one._make_record) as read:
            found = inputs_of(one, prefix)
        assert read.call_count == 1
        assert [f"{name[0]}{number}" for name, number in found] == texts


def test_the_record_of_a_pair(one, tmp_path, monkeypatch, recwarn):
    """It has no signatures; a new pair removes it; a damaged record counts as none."""
    monkeypatch.chdir(tmp_path)
    fsspec.filesystem("memory").pipe_file("/b/a.jsonl?sig=s3cret", GOOD)
    pathlib.Path("b.jsonl").write_bytes(GOOD * 2)
    made = one.preprocess(["memory://b/a.jsonl?sig=s3cret", "b.jsonl"], "o", Tok())["text"]
    path = pathlib.Path(f"{made}.record.json")
    record = json.loads(path.read_text())
    inputs = [["memory://b/a.jsonl", 1], ["b.jsonl", 2]]
    wanted = {"tokenizer": Tok().unique_identifiers, "inputs": inputs, "append_eod": False}
    assert record == wanted | {end: os.path.getsize(f"{made}.{end}") for end in ("bin", "idx")}
    mk(one, tmp_path / "upstream", [[1], [2], [3]], np.uint16)
    one.merge(["upstream", made], "all")
    merged = json.loads(pathlib.Path("all.record.json").read_text())
    assert merged.items() >= {**wanted, "inputs": [["upstream", 3], *inputs]}.items()
    mk(one, tmp_path / "all", [[5]])
    assert not os.path.exists("all.record.json")

    wrong = [{"bin": 9}, {"idx": 9}, {"tokenizer": "bytes"}, {"inputs": None}, {"job": 5}]
    wrong += [{"more": 5}, {"inputs": [[2, 2]]}, {"inputs": [["a", 2.5]]}, {"append_eod": 5}]
    contents = [json.dumps(record | values) for values in wrong]
    for content in [*contents, "", "[]", "\0", "[" * 99999]:
        path.write_text(content)
        assert inputs_of(one, made) == [(None, None)] * 3, content[:200]
    del record["append_eod"]  # as releases before had it
    path.write_text(json.dumps(record | {"inputs": [["b.jsonl", 2]]}))  # of fewer documents
    assert inputs_of(one, made) == [("b.jsonl", 0), ("b.jsonl", 1), (None, None)]
    assert [str(each.message) for each in recwarn if each.category is UserWarning] == []


def test_a_pair_of_a_different_tokenizer(one, tmp_path, monkeypatch):
    """Each start warns once for each corpus, and merge refuses; the package does not matter."""
    monkeypatch.chdir(tmp_path)
    of_a_file = {"class": "HuggingFaceTokenizer", "package": "tokenizers", "eod": 0}
    tokenizers = {
        "tok": Tok(),
        "file": Tok(unique_identifiers=of_a_file),
        "gigatoken": Tok(unique_identifiers=of_a_file | {"package": "gigatoken"}),
        "nameless": Tok(unique_identifiers=None),
    }
    mk(one, tmp_path / "bare_text_document", [[1] * 9] * 2, np.uint16)
    for name, tokenizer in tokenizers.items():
        one.preprocess(texts=["1 2 3 4 5 6 7 8 9"] * 2, output_prefix=name, tokenizer=tokenizer)
    words = "^file_.* made with a different tokenizer than tok_.*: its class is "
    words += "'HuggingFaceTokenizer', not 'Tok'; preprocess"
    for names, refused in (
        ("tok tok bare file", words),
        ("file gigatoken file", None),
        ("bare tok nameless tok", None),
    ):
        with refusal(refused):
            one.merge([f"{name}_text_document" for name in names.split()], "merged")
        assert os.path.exists("merged.idx") == (refused is None)
    blend = ["tok_text_document", "merged", "bare_text_document"]
    fields = {"path_to_cache": "cache", "split": "1,1,0"}
    for tokenizer, corpora in ((Tok(), []), (Tok(eod=5), ["tok", "merged"])):
        cfg = config(one, (blend, None), tokenizer=tokenizer, **fields)
        words = r"^(merged|tok)\S* was .* than the config's: its eod is 0, not 5; give the config "
        for _ in range(2):  # the second finds a cache
            _, messages = heard(build, one, [1, 1, 0], cfg)
            assert [re.search(words, message)[1] for message in messages] == corpora


def test_pairs_with_and_without_eod(one, tmp_path, capsys, monkeypatch):
    """A merge and a blend of both warn; an older record says nothing.  A command tells of eods."""
    monkeypatch.chdir(tmp_path)
    record = pathlib.Path("old_text_document.record.json")
    for name in ("with", "without", "old"):
        one.preprocess(texts=["aaa"] * 3, output_prefix=name, append_eod=name == "with")
    record.write_text(re.sub(r',\s+"append_eod": false', "", record.read_text()))
    mk(one, tmp_path / "bare_text_document", [[1] * 9], np.uint16)
    for names, found, says in (
        ("with with", True, "; ByteTokenizer, with eod"),
        ("without bare old", False, "; ByteTokenizer, without eod"),
        ("old old", "nothing", "; ByteTokenizer"),
        ("bare bare", "nothing", ""),
        ("old without with", None, "; ByteTokenizer, partly with eod"),
        ("with mixed", None, "; ByteTokenizer, partly with eod"),
    ):
        prefixes = [f"{name}_text_document" for name in names.split()]
        code, out, err = command(one, capsys, "merge", "--input", *prefixes, "--output-prefix", "m")
        assert (code, out.endswith(f" tokens (uint16){says}\n")) == (0, True), out
        merged = json.loads(pathlib.Path("m.record.json").read_text())
        assert merged.get("append_eod", "nothing") is found
        cfg = config(one, (prefixes, None), tokenizer=one.ByteTokenizer(), sequence_length=2)
        _, messages = heard(build, one, [1, 0, 0], cfg)
        assert len(messages) == err.count("warning: ") == (found is None)
        words = rf"pairs differ in append_eod .{prefixes[-2]} .* {prefixes[-1]} .*preprocess them"
        assert all(re.search(words, message) for message in [*messages, *err.splitlines()])
        for end in ("bin", "idx", "record.json"):
            os.replace(f"m.{end}", f"mixed_text_document.{end}")


# -- Inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_or_changed_is_named(one, tmp_path, extension):
    """Cut anywhere, or with another beginning; as a whole it is read to the end."""
    path = tmp_path / f"b.jsonl{extension}"
    whole = compress(b"".join(b'{"text": "%d"}\n' % k**2 for k in range(300)), extension)
    cut = [whole[: rng.integers(1, len(whole))] for rng in cases(4)]
    for content in [*cut, b"\xff" * 20 + whole[20:]]:
        path.write_bytes(content)
        raises(OSError, r"b\.jsonl\S+: cannot be read", one.preprocess, path, tmp_path / "o")
        assert os.listdir(tmp_path) == [path.name]
    path.write_bytes(whole)
    made = one.preprocess(path, tmp_path / "o")["text"]
    assert texts_of(one, made) == [list(b"%d" % k**2) for k in range(300)]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_inputs_of_all_kinds_from_all_places(one, tmp_path, monkeypatch):
    """Arguments keep their order, patterns are sorted, and a match is asked its size once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-").write_bytes(b"oops")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(GOOD + b'{"text": "i"}')))
    os.mkfifo("fifo")
    threading.Thread(target=(tmp_path / "fifo").write_bytes, args=(GOOD,), daemon=True).start()
    memory = fsspec.filesystem("memory")
    for name, content in (("b2", GOOD * 3), ("b1", b'{"text": "a"}\n'), ("b10", b'{"text": "x"}')):
        memory.pipe_file(f"{tmp_path}/{name}.jsonl", content)
    for name in ("d2", "d1", "d1.json::d", "d10", "[de]*"):  # what exists is a file, and no pattern
        jsonl(tmp_path / f"{name}.json", [name])
    compressed = tmp_path / "c.jsonl.gz"
    compressed.write_bytes(compress(GOOD * 9, ".gz"))
    memory.pipe_file(f"{compressed}?sig=1", compressed.read_bytes())
    inputs = [f"memory://{compressed}?sig=1", compressed, f"memory://{tmp_path}/b*.jsonl"]
    inputs += ["d*.json", tmp_path / "[de]*.json", "-", "fifo"]
    with mock.patch.object(type(memory), "info", side_effect=memory.info) as info:
        with mock.patch.object(type(memory), "invalidate_cache") as invalidate_cache:
            merged = make_shards(one, inputs, tmp_path, 1)
    invalidate_cache.assert_any_call()  # of all folders that a pattern may match
    assert [call.args[0] for call in info.call_args_list].count(f"{tmp_path}/b1.jsonl") == 1
    texts = [*["1"] * 18, "a", "x", *["1"] * 3, "d1", "d1.json::d", "d10", "d2", "[de]*"]
    texts += ["1", "i", "1"]
    assert texts_of(one, merged) == [list(text.encode()) for text in texts]


def test_compressed_files_that_are_not_read(one, tmp_path, monkeypatch):
    """A .zst of a long window, as of `zstd --long=31`; a .zst without a reader; and all others."""
    zstd = pytest.importorskip(ZSTD)
    window = bytes([(31 - 10) << 3])  # of 2^31 bytes
    block = (len(GOOD) << 3 | 1).to_bytes(3, "little") + GOOD  # the last one, not compressed
    path = tmp_path / "a.jsonl.ZST"
    path.write_bytes(b"\x28\xb5\x2f\xfd\0" + window + block)
    raises(OSError, r"a\.jsonl\.ZST: cannot be .*memory", one.preprocess, path, tmp_path / "o")
    path.write_bytes(zstd.compress(GOOD))
    one.preprocess(path, tmp_path / "o")
    for module in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"compression\.zstd.*pip install backports\.zstd$"):
        one.preprocess(path, tmp_path / "o")
    for extension in ("bz2", "XZ", "lzma", "zip", "tar"):
        words = rf"a\.jsonl\.{extension}: only .* unpack .* bzcat F \| zstd > F\.zst$"
        path = path.rename(tmp_path / f"a.jsonl.{extension}")
        raises(ValueError, words, one.preprocess, path, tmp_path / "o")


def test_sentences_are_sequences(one, tmp_path, monkeypatch):
    """If nltk has no model of English, its untrained model finds them, and a warning says so."""
    punkt = pytest.importorskip("nltk.tokenize.punkt")
    monkeypatch.setattr(punkt, "PunktTokenizer", mock.Mock(side_effect=LookupError))
    # the last one is a list of parts, each of which is split
    texts = ["I see.  You do? Yes", "", "4", ["7. A", "", "9."]]
    job = {"output_prefix": tmp_path / "o", "append_eod": True, "workers": 2}
    with pytest.warns(UserWarning, match="punkt_tab"):
        made = one.preprocess(texts=[{"text": text} for text in texts], split_sentences=True, **job)
    punkt.PunktTokenizer.assert_called_with("english")
    assert made == {"text": f"{tmp_path}/o_text_sentence"}
    pair = one.IndexedDataset(made["text"])
    found = [bytes((ids % 220).tolist()).decode() for ids in pair[:]]  # 256 % 220 is a $
    assert found == ["I see.", "You do?", "Yes$", "4$", "7.", "A", "9.$"]
    assert pair.document_indices.tolist() == [0, 3, 3, 4, 7]


def test_what_a_server_answers(one, web, no_pauses, tmp_path):
    """Sizes are asked for again, contents are not; no message has the query (a signature)."""
    root = web.root
    url_alone = f"url='{root}/a.jsonl"
    lines = b'{"text": "%s"}\n' % (b"a" * 9000) * 9  # more than is read at a time
    contents = {"a.jsonl": lines, "a.jsonl.gz": compress(lines, ".gz")}
    contents |= {"b.jsonl": b"oops", "b.jsonl.gz": b"nothing", "b.jsonl.ZIP": b""}
    for name, content in contents.items():
        pathlib.Path(web.folder, name).write_bytes(content)
    for name, faults, pauses, words in (
        ("a.jsonl", [503] * 3, 1, None),
        ("a.jsonl", [None] * 3 + [503] * 3, 1, None),
        ("a.jsonl", [503] * 99, 4, f".*503.*{url_alone}"),
        ("a.jsonl", [None, None, 503], 0, f"cannot be read: .*503.*{url_alone}"),
        ("a.jsonl", ["no length"] * 99, 0, None),
        ("a.jsonl.gz", ["no length"] * 99, 0, None),
        ("b.jsonl.gz", [], 0, "cannot be read: Not a gzipped file"),
        ("b.jsonl", [], 0, "not a JSON object: .*'oops'"),
        ("b.jsonl.ZIP", [], 0, "only .gz and .zst can be decompressed"),
        ("none.jsonl", [], 0, "no such file"),
    ):
        no_pauses.clear()
        web.faults = iter(faults)
        url = f"{root}/{name}?X-Amz-Signature={SECRET}%2F&u=1"
        if words is None:
            made = one.preprocess(url, tmp_path / "o")["text"]
            assert texts_of(one, made) == [[97] * 9000] * 9
        else:
            words = f"^{root}/{name}(, line 1)?: {words}"
            with pytest.raises((ValueError, OSError), match=words) as refusal:
                one.preprocess(url, tmp_path / "o")
            assert SECRET not in str(refusal.value)
            assert refusal.value.__cause__ is None
            assert refusal.value.__suppress_context__ or refusal.value.__context__ is None
        assert len(no_pauses) == pauses, (name, faults)


@pytest.mark.parametrize("extension", ["", ".gz"])
def test_an_input_that_changes_while_it_is_read(one, bucket, tmp_path, monkeypatch, extension):
    """It grew, shrank at the end of a line, or was rewritten; a chmod or a link is no change."""
    monkeypatch.setattr(one, "_BLOCK_BYTES", 1)
    part = compress(GOOD * 5, extension)
    content = part * 2
    path = tmp_path / f"a.jsonl{extension}"
    for new in (part, part * 3, content):

        def change(text, new=new):
            path.write_bytes(new)
            os.utime(path, (5, 5))

        path.write_bytes(content)
        words = rf"{path.name}: cannot be read: it changed .*{len(content)} bytes at the start"
        raises(OSError, words, one.preprocess, path, tmp_path / "o", acting(change))
        assert os.listdir(tmp_path) == [path.name]

    def touch(text):
        path.chmod(0o600)
        os.link(path, tmp_path / secrets.token_hex())

    one.preprocess(path, tmp_path / "o", acting(touch))
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"/bucket/{path.name}", content)
    info = mock.Mock(return_value={"type": "file", "size": 4000})
    monkeypatch.setattr(type(memory), "info", info)
    with pytest.raises(OSError, match=rf"4,000 bytes at the start, {len(content)} bytes read.;"):
        one.preprocess(f"memory://bucket/{path.name}", tmp_path / "o")


# -- Documents ---------------------------------------------------------------------------------


def test_each_key_makes_a_pair(one, tmp_path, monkeypatch, capsys):
    """Files and texts give the same, in several blocks; a bad line is empty in each pair."""
    monkeypatch.setattr(one, "_BLOCK_BYTES", 1000)
    rows = [{"x": "a" * 3 * k, "n": k, "y": ["b", "c" * k]} for k in range(100)]
    wanted = {key: [list("".join(row[key]).encode()) for row in rows] for key in "yx"}
    wanted["y"][9] = wanted["x"][9] = []
    rows[9]["y"] = 9
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"json_keys": ["y", "x"], "on_error": "skip"}
    tqdm = mock.MagicMock()
    bar = tqdm.tqdm.return_value.__enter__.return_value
    bar.n = 0
    monkeypatch.setitem(sys.modules, "tqdm", tqdm)
    clock = mock.Mock(side_effect=itertools.count(0, 0.001))
    with mock.patch.object(time, "perf_counter", clock):
        made = quiet(one.preprocess, path, tmp_path / "o", verbose=True, **keys)
    size = path.stat().st_size
    assert tqdm.tqdm.call_args == mock.call(total=size, unit="B", unit_scale=True, disable=None)
    bar.update.assert_called_with(size)
    words = f"100 documents, {size:,} bytes, {size / 1000:,.1f} MB/s\n"  # in a millisecond
    assert capsys.readouterr().err == words
    of_texts = quiet(one.preprocess, None, tmp_path / "t", texts=iter(rows), workers=3, **keys)
    assert capsys.readouterr().err == ""
    assert made == {key: f"{tmp_path}/o_{key}_document" for key in ("y", "x")}
    for key, prefix in made.items():
        assert texts_of(one, prefix) == wanted[key]
        assert bytes_of_pair(of_texts[key]) == bytes_of_pair(prefix)


def test_a_tokenizer_is_called_for_no_empty_list(one, tmp_path, monkeypatch):
    """Empty inputs, blank lines, a last line that fills a block; trace() names the right lines."""

    def tokenize_batch(texts):
        return np.split(np.array([int(text) for text in texts]), len(texts))  # 0: an error

    tokenizer = Tok(tokenize_batch=tokenize_batch)
    job = {"output_prefix": tmp_path / "o", "tokenizer": tokenizer, "on_error": "skip"}
    blank = b"\n" * 9
    contents = [b"", blank, GOOD, blank + GOOD, GOOD + blank + b"oops\n" + GOOD, b'{"text": []}']
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.jsonl").write_bytes(content)
    for workers, size in ((1, 1), (1, 1 << 19), (2, 20)):
        monkeypatch.setattr(one, "_BLOCK_BYTES", size)
        made, (bad, empty) = heard(one.preprocess, tmp_path / "*.jsonl", workers=workers, **job)
        assert texts_of(one, made["text"]) == [[1], [1], [1], [], [1], []]
        lines = [(name[-7:], number) for name, number in inputs_of(one, made["text"])]
        assert lines == [(f"{name}.jsonl", k) for name, k in ((2, 0), (3, 0), (4, 0), (4, 2))]
        assert re.search(r"^1 bad line skipped .*/4\.jsonl, line 11: .*'oops'$", bad)
        assert re.search(r"no documents in 2 inputs; is .*/0\.jsonl empty\?$", empty)
    assert len(one.IndexedDataset(quiet(one.preprocess, None, texts=[], **job)["text"])) == 0


def test_ids_may_be_of_any_kind(one, tmp_path):
    """Words are no ids; a tokenize_batch that raises NotImplementedError counts as missing."""

    class NoBatches(Tok):
        tokenize_batch = property(mock.Mock(side_effect=NotImplementedError))

    path = jsonl(tmp_path / "a.jsonl", ["abc", "a"])
    tokenizer = NoBatches(vocab_size=70_001, eod=70_000, tokenize=mock.Mock())
    job = {"output_prefix": tmp_path / "o", "tokenizer": tokenizer, "append_eod": True}
    kinds = [np.array([3, 3], dtype) for dtype in (np.uint8, np.int64, np.uint64)]
    for found in [[3, 3], (3, 3), torch.tensor([3, 3]), *kinds]:
        tokenizer.tokenize.return_value = found
        assert texts_of(one, one.preprocess(path, **job)["text"]) == [[3, 3, 70_000]] * 2
    own_eods = job | {"tokenizer": Tok(), "texts": ["3 0"]}  # no warning of two of them
    made, messages = heard(one.preprocess, None, **own_eods)
    assert (texts_of(one, made["text"]), messages) == ([[3, 0, 0]], [])
    for make in (one.encode_jsonl, one.preprocess):
        for found in (["3"], "3", [3.0], [True], [[3]], 3, None, {"input_ids": [3]}, iter([3])):
            tokenizer.tokenize.return_value = found
            raises(ValueError, "of NoBatches, got", make, path, **job)
        for missing in ("tokenize", "vocab_size", "eod"):
            with pytest.raises(ValueError, match=f"Tok needs an attribute {missing} "):
                make(path, **job | {"tokenizer": Tok(**{missing: None})})


TABLE = types.SimpleNamespace(columns=["text"])  # as pandas, pyarrow and polars have them
COLUMN = types.SimpleNamespace(to_pylist=list)  # as pyarrow has it
REFUSED = {  # the file a.jsonl, other arguments of preprocess, and what the error says
    "lost texts": (GOOD, {"tokenizer": Tok(tokenize_batch=mock.Mock(return_value=[]))}, "0 lists"),
    "an id that does not fit": (b'{"text": "70000"}', {"tokenizer": Tok()}, "line 1: .*70000"),
    "no file of a pattern": (GOOD, {"input": ["a.jsonl", "*.none"]}, r"\*\.none"),
    "no object of a pattern": (GOOD, {"input": "memory://none*.jsonl"}, "matches no file"),
    "two kinds of input": (GOOD, {"texts": ["a"]}, "either input .* or texts; got both"),
    "neither of them": (GOOD, {"input": None}, "either input .* or texts; got neither"),
    "no input": (GOOD, {"input": []}, "at least one input"),
    "no folder": (GOOD, {"output_prefix": "none/o"}, "No such file or directory: .none/o"),
    "no prefix": (GOOD, {"output_prefix": None}, "output_prefix is missing"),
    "no keys": (GOOD, {"json_keys": []}, "json_keys: expected at least one"),
    "bad lines alone": (b"oops\n\n{}\n", {"on_error": "skip"}, "every line .*, line 1: .* 3: "),
    "one text": (GOOD, {"input": None, "texts": b"abc"}, "an iterable of strings or dicts"),
    "splits": (GOOD, {"input": None, "texts": {"train": []}}, "an iterable of strings or dicts"),
    "a table": (GOOD, {"input": None, "texts": TABLE}, r"strings or dicts, .*\.to_pylist\(\)"),
    "a column": (GOOD, {"input": None, "texts": COLUMN}, r"strings or dicts, .*\.to_pylist\(\)"),
    "a shard of a pipe": (GOOD, {"input": "-", "shard": (0, 2)}, "-: .*size.*save it to a file"),
    "workers": (GOOD, {"workers": 0}, "workers: .*, got 0"),
    "workers that may not be started": (GOOD, {"workers": 2}, "use workers=1"),
    "shard": (GOOD, {"shard": (2, 2)}, r"shard: expected .* got \(2, 2\)"),
    "on_error": (GOOD, {"on_error": "maybe"}, "on_error: .*'maybe'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_its_reason_and_leaves_nothing(one, tmp_path, monkeypatch, case):
    """In a process that may have no children, too.  Upstream: hangs, and leaves a .bin."""
    content, arguments, words = REFUSED[case]
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    monkeypatch.chdir(tmp_path)
    pathlib.Path("a.jsonl").write_bytes(content)
    with pytest.raises((ValueError, OSError), match=words):
        one.preprocess(**{"input": "a.jsonl", "output_prefix": "o"} | arguments)
    assert os.listdir() == ["a.jsonl"]


NO_OBJECT = "not a JSON object: "
BAD_LINES = {  # and what is said of each
    b'{"text": "a"': NO_OBJECT + r"""Expecting ',' delimiter at column 13; it begins '{"t""",
    b"\0" * 98: NO_OBJECT + "Expecting value at column 1; it begins " + repr("\0" * 60),
    '{"text": "a"}'.encode("utf-16-be") + b"\0": r"""it begins '\x00{\x00"\x00""",
    b'{"text": "\xff"}': "'utf-8' codec can't decode byte 0xff in position 10",
    b'{"text": "a\\ud83d"}': "key 'text': 'utf-8' codec can't encode",
    b'{"other": "a"}': "expected the key 'text', got only ['other']",
    b'{"text": ["a", 5]}': "key 'text': ",
    b'{"text": "a\tb"}': NO_OBJECT + "Invalid control character at column 12; it begins",
    b'\xef\xbb\xbf{"text"': NO_OBJECT + "Expecting ':' delimiter at column 8; it begins",
    b"\x1f\x8b\x08\0": NO_OBJECT + "the file is compressed with gzip; decompress it, or give it a "
    "name that ends in .gz",
    b"\x28\xb5\x2f\xfd": NO_OBJECT + "the file is compressed with zstd; decompress it, or give it "
    "a name that ends in .zst",
    b'["text"]': NO_OBJECT + """it is a list; it begins '["text"]'""",
    b'{"n": %s}' % (b"1" * 5000): "4300 digits",  # Python reads no longer numbers
    b"[" * 100_000: "while decoding a JSON array",
    b'{"text": "%s"}' % (b"a" * 200_000): "longer than 200,000 bytes",
}


def test_bad_lines_anywhere_are_named_or_skipped(one, tmp_path, monkeypatch):
    """A skipped line becomes an empty document, and the first five are named."""
    assert one._LONGEST_LINE == 2**31 - 1
    monkeypatch.setattr(one, "_LONGEST_LINE", 200_000)
    monkeypatch.setattr(one, "_BLOCK_BYTES", 60)
    path = tmp_path / "a.jsonl"
    first = b"\n\xef\xbb\xbf" + GOOD * 9 + b"\n"  # with a BOM
    job = {"input": path, "output_prefix": tmp_path / "o"}
    bad = []
    for line, words in BAD_LINES.items():
        bad.append(line + b"\n" + GOOD)
        path.write_bytes(first + bad[-1])
        with pytest.raises(ValueError) as refusal:
            one.preprocess(**job)
        said = str(refusal.value).replace("\N{REPLACEMENT CHARACTER}", r"\ufffd")
        assert "a.jsonl, line 12: " in said and words in said and len(said) < 600, said
        assert said.endswith('; to skip bad lines, use on_error="skip" (--on-error skip)')
        assert "(char " not in said, "json counts lines, too"
    assert not list(tmp_path.glob("o*"))
    path.write_bytes(first + b"".join(bad))
    made, [skipped] = heard(one.preprocess, on_error="skip", workers=3, **job)
    assert skipped.startswith(f"{len(bad)} bad lines skipped (stored without tokens): ")
    assert re.findall(r"a\.jsonl, line (\d+): ", skipped) == ["12", "14", "16", "18", "20"]
    assert skipped.endswith("; ...")
    assert texts_of(one, made["text"]) == [[49]] * 9 + [[], [49]] * len(bad)


def test_texts_are_checked_as_lines_are(one, tmp_path):
    """One that is neither text nor dict, or holds what JSON does not know, is a bad one."""
    bad = [b"b", bytearray(b"b"), None, 5, 1.5, ["b"], np.arange(3), object()]
    bad += [{"text": value} for value in (b"b", None, 5, np.arange(3), {1: {2}}, "\ud83d")]
    circle = {}
    circle["text"] = circle
    bad += [{}, {"other": "b"}, {("text",): "b"}, circle]
    rows = ["1", *bad, {"text": "2"}, {"text": ["3", "4"], "other": object()}]
    job = {"tokenizer": Tok(tokenize_batch=None), "json_keys": "text", "on_error": "skip"}
    said = rf"{len(bad)} bad lines .*: texts, line 2: .* a text, .* got b'b'; texts, line 3: "
    with pytest.warns(UserWarning, match=said):
        made = one.preprocess(None, tmp_path / "o", texts=rows, **job)
    assert texts_of(one, made["text"]) == [[1], *[[]] * len(bad), [2], [3, 4]]


# -- Faults ------------------------------------------------------------------------------------


def acting(act):
    """A tokenizer of numbers that does something at each text before."""

    def tokenize(text):
        act(text)
        return [int(number) for number in text.split()]

    return Tok(tokenize=tokenize)


def test_what_a_tokenizer_raises_at_a_line(one, tmp_path):
    """A panic is that line's fault.  What is no line's fault ends the job, also with skip."""

    def act(text):
        if text == "13":
            raise error

    error = Panic("an index is out of bounds")
    job = {"texts": ["1", "13", "2"], "output_prefix": tmp_path / "o", "tokenizer": acting(act)}
    raises(ValueError, "texts, line 2: Panic: an index is out", one.preprocess, workers=2, **job)
    with pytest.warns(UserWarning, match="1 bad line .*: texts, line 2: Panic: "):
        made = one.preprocess(append_eod=True, on_error="skip", **job)
    assert texts_of(one, made["text"]) == [[1, 0], [], [2, 0]]
    for error in (MemoryError("no room"), FileNotFoundError(2, "no room")):
        for workers, kind in ((1, type(error)), (2, ChildProcessError)):
            raises(kind, "no room", one.preprocess, on_error="skip", workers=workers, **job)
    error = KeyboardInterrupt()
    raises(KeyboardInterrupt, None, one.preprocess, **job)


@linux
def test_workers_do_without_threads(one, tmp_path, hf):
    """A fork loses the threads of torch and tokenizers: what waits for them waits for ever."""
    words = one.build_tokenizer(hf)

    def tokenize(text):
        assert torch.ones(1 << 20).sum() == 1 << 20  # shared out to all threads
        [ids, _] = words.tokenize_batch([text] * 2)  # so are these
        return [*ids.tolist(), torch.get_num_threads()]

    def run():
        torch.set_num_threads(2)
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        words.tokenize_batch(["ja nein", "weit"] * 500)
        warnings.simplefilter("error")
        for workers in (1, 2):
            job = {"tokenizer": Tok(vocab_size=70_001, tokenize=tokenize), "workers": workers}
            one.preprocess(texts=["weit"] * 4, output_prefix=tmp_path / f"{workers}", **job)

    assert in_child(run, timeout=60) == 0
    assert texts_of(one, tmp_path / "1_text_document") == [[70_000, 2]] * 4
    assert texts_of(one, tmp_path / "2_text_document") == [[70_000, 1]] * 4


@linux
def test_signals_in_workers(one, tmp_path, monkeypatch):
    """Ctrl-C is left to the command; if a worker ends, the error has its exit code."""
    monkeypatch.setattr(one, "_BLOCK_BYTES", 1)
    command = os.getpid()

    def act(text):
        if os.getpid() == command:
            return
        if text == "4":
            sys.exit(4)
        if text == "5":  # the worker ends in the middle of its result
            monkeypatch.setattr(Connection, "send", send_a_part)
            return
        os.kill(os.getpid(), int(text))

    Connection = multiprocessing.connection.Connection

    def send_a_part(connection, result):
        os.write(connection.fileno(), struct.pack("!i", 100) + b"x")
        os._exit(5)

    def run(*texts):
        return one.preprocess(None, tmp_path / "o", acting(act), texts=texts, workers=2)

    class Missing(Tok):
        def __reduce__(self):
            return __import__, ("no_module",)

    before = set(multiprocessing.active_children())
    for text, reason in (("9", "-9, Killed"), ("4", "4"), ("5", "5")):
        words = rf"\(exit code {reason}\); .* fewer workers; .* workers=1 "
        before_it = "22" if text == "9" else "222"  # the first worker, or the last one
        raises(ChildProcessError, words, run, *before_it, text, "2")
        assert set(multiprocessing.active_children()) <= before
    with pytest.raises(ValueError, match="texts, line 2: ") as kept:
        run("2", 5, "2", "2")
    assert set(multiprocessing.active_children()) <= before
    del kept
    with monkeypatch.context() as patches:
        patches.setattr(sys, "platform", "darwin")  # where a worker unpickles its tokenizer
        with pytest.raises(ChildProcessError, match=r"\(exit code 1\); .* workers=1 "):
            one.preprocess(None, tmp_path / "o", Missing(), texts=["1"], workers=2)
    assert os.listdir(tmp_path) == []
    made = run(*["2"] * 4)["text"]  # the number of SIGINT
    assert texts_of(one, made) == [[2]] * 4


@linux
def test_jobs_in_threads_of_one_process(one, tmp_path, monkeypatch):
    """A killed worker ends its job at once, though other jobs fork at the same time."""
    monkeypatch.setattr(one, "_BLOCK_BYTES", 1)
    start = FORK.Process.start
    together = threading.Barrier(3)

    def start_together(process):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.2)
        start(process)
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.2)

    def act(text):
        if text == "9":
            os.kill(os.getpid(), signal.SIGKILL)

    def run():
        FORK.Process.start = start_together
        has_ended = threading.Event()

        def texts():
            yield "1"
            has_ended.wait()
            yield "2"

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            jobs = []
            for number, rows in enumerate((["9"] * 4, texts(), texts())):
                job = {"texts": rows, "workers": 2, "tokenizer": acting(act)}
                jobs.append(pool.submit(one.preprocess, None, tmp_path / f"{number}", **job))
            raises(ChildProcessError, "exit code -9", jobs[0].result)
            has_ended.set()
            for job in jobs[1:]:
                assert texts_of(one, job.result()["text"]) == [[1], [2]]

    assert in_child(run, timeout=60) == 0


@linux
def test_a_disk_that_is_full(one, tmp_path):
    """The pair of both keys is there, or none is."""
    path = tmp_path / "a.jsonl"
    for row in ({"text": "x" * 40_000, "b": "c"}, {"text": "x", "b": "c" * 40_000}):
        path.write_text(json.dumps(row))
        with pytest.raises(OSError), files_of_64_kib():
            one.preprocess(path, tmp_path / "o", json_keys=["text", "b"])
        assert os.listdir(tmp_path) == ["a.jsonl"]


# ==============================================================================
# 21. Other data
# ==============================================================================


class ChatTokenizer(Tok):
    """A tokenizer with a template of its own, as upstream's for fine-tuning have."""

    def tokenize_conversation(self, conversation, return_target, add_generation_prompt):
        assert return_target and not add_generation_prompt
        pairs = []  # of a token and its target
        for message in conversation:
            learned = message["role"] == "assistant"
            for number in self.tokenize(message["content"]):
                pairs.append((number, number if learned else -100))
        return np.array(pairs, int).reshape(-1, 2).T


def chat(one, path, n=None, **fields):
    """An SFTDataset of n samples over all (or the given) rows of a file; S = 8."""
    fields = {"tokenizer": ChatTokenizer(pad=999), "cls": one.SFTDataset} | fields
    return gpt(one, str(path), n, **fields)


ROW = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
CP_4 = {"context_parallel_size": 4}


def write_parquet(path, columns, **arguments):
    """Write a Parquet file."""
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(sys.modules["pyarrow"].table(columns), path, **arguments)


def random_row(rng, longest):
    """A row of some conversations, of numbers for ChatTokenizer, with a key more."""
    messages = []
    for role in rng.choice(["system", "user", "assistant"], rng.integers(1, 12)).tolist():
        numbers = rng.integers(1, 50, rng.integers(0, longest))
        messages.append({"role": role, "content": " ".join(map(str, numbers)), "weight": 0})
    return messages


def brute_chat_sample(messages, S, pad, cp):
    """A sample by the rules of upstream, one after the other, on a list; the eod is 0."""
    fill = 0 if pad is None else pad
    places = []  # token, target, position, is it filled up?
    ends = [0]
    for number, message in enumerate([*messages, {"role": "system", "content": ""}]):
        if message["role"] == "system" and number > 0:  # a conversation ends
            while cp > 1 and len(places) % (2 * cp):
                places.append((fill, fill, len(places) - ends[-1], True))
            ends.append(len(places))
            if len(places) > S:
                break
        for token in message["content"].split():
            target = int(token) if message["role"] == "assistant" else -100
            places.append((int(token), target, len(places) - ends[-1], False))
    places = places[:S]
    while len(places) < S + 1:
        position = places[-1][2] + 1 if places else 0
        places.append((fill, fill, position, True))
    ends[-1] = S
    tokens, targets, positions, filled = np.array(places).T
    labels = targets[1:]
    is_padding = filled[1:] == 1 if pad is None else labels == pad
    starts = [end for end in ends if end < S]
    if len(starts) > S:
        starts = sorted(set(starts))
    return {
        "tokens": tokens[:-1],
        "labels": labels,
        "loss_mask": np.where(is_padding | (labels == -100), np.float32(0), np.float32(1)),
        "position_ids": positions[:-1],
        "cu_seqlens": np.array((starts + [S] * (S + 1))[: S + 1], np.int32),
        "max_seqlen": np.array(max(np.diff(ends)), np.int32),
    }


def write_rows(path, rows, rng):
    """A file of rows: Parquet; or lines, also blank, or of Windows, the last one without an end."""
    if path.suffix == ".parquet":
        write_parquet(path, {"messages": rows}, row_group_size=int(rng.integers(1, 5)))
        return
    ends = ["\n", "\r\n", "\n \t\r\n\n"]
    content = str(rng.choice(["", "\n\n", "\ufeff"]))
    for messages in rows:
        content += json.dumps({"messages": messages}) + str(rng.choice(ends))
    path.write_bytes(content.removesuffix("\n").encode())


@pytest.mark.parametrize("kind, pad", [("jsonl", 7), ("jsonl", None), ("parquet", 999)])
def test_samples_of_conversations_equal_the_rules(one, tmp_path, kind, pad):
    """Tokens may equal the pad id (7); without a pad, eod (0) fills."""
    path = tmp_path / f"chat.{kind}"
    for rng in cases(15):
        rows = [random_row(rng, rng.choice([2, 3, 12])) for _ in range(rng.integers(1, 6))]
        rows.append([{"role": "system", "content": "5", "weight": 0}] * 3)  # of which two may fit
        write_rows(path, rows, rng)
        S = int(2 ** rng.uniform(0, 5))
        cp = int(rng.integers(1, 4))
        if cp > 1:
            S += -S % (2 * cp)
        tokenizer = ChatTokenizer(pad=pad)
        fields = {"sequence_length": S, "context_parallel_size": cp, "tokenizer": tokenizer}
        ds = pickle.loads(pickle.dumps(chat(one, path, 2 * len(rows), **fields)))
        assert len(ds.dataset) == len(rows)
        for k in rng.permutation(len(ds)).tolist():
            wanted = brute_chat_sample(rows[k % len(rows)], S, pad, cp)
            same_samples(quiet(ds.__getitem__, k), wanted, (rows[k % len(rows)], S, cp))
        same_samples(ds[None], {**ds[0], "loss_mask": torch.zeros(S)})


@pytest.mark.parametrize("changed", [0, -1])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_of_rows_that_is_replaced(one, tmp_path, kind, changed):
    """The file that was opened is read on, whole rows; who unpickles it refuses another."""
    old, new = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    rows = [[ROW[0], {"role": "assistant", "content": str(k)}] for k in range(100, 199)]
    write_rows(old, rows, np.random.default_rng(0))
    rows[changed] = rows[50]
    write_rows(new, rows, np.random.default_rng(0))
    ds = chat(one, old)
    content = old.read_bytes()
    assert ds.dataset.fingerprint()["ends_crc32"] == zlib.crc32(content[:4096] + content[-4096:])
    wanted = ds[changed]["tokens"].tolist()
    pickled = pickle.dumps(ds)
    assert b"assistant" not in pickled
    assert pickle.loads(pickled)[changed]["tokens"].tolist() == wanted
    os.replace(new, old)
    assert ds[changed]["tokens"].tolist() == wanted
    words = f"a.{kind} was replaced .*build .*(ends_crc32|size was)"
    raises(one.DatasetFormatError, words, pickle.loads, pickled)
    if kind == "jsonl":
        os.utime(old, (0, 0))  # what is written now has another time
        ds = chat(one, old)
        write_rows(old, rows, np.random.default_rng(0))
        words = "a.jsonl: the file was written .*build the dataset"
        raises(ValueError, words, ds.__getitem__, changed)
        os.truncate(old, 5)
        raises(ValueError, "a.jsonl, line .* of .* bytes at offset ", ds.__getitem__, changed)


def test_a_row_that_is_bad_or_without_loss_is_named(one, tmp_path):
    """An error names a bad row; if nothing is learned from a row, a warning does, once."""
    nothing = {"tool_calls": None, "name": "", "tools": [], "function_call": {}}  # of converters
    good = [message | nothing for message in ROW * 2]
    other = [{"role": "human", "content": "1"}, {"role": "gpt", "content": "2"}]
    long = [{"role": "user", "content": "1 " * 32}, ROW[1]]
    lines = [json.dumps({"messages": messages}) for messages in (good, other, long)]
    bad = {
        "{oops": "not a JSON object: .*'{oops'",
        '{"text": "a"}': "expected .messages., a list.*got {'text': 'a'}",
        '{"messages": []}': "empty",
        '{"messages": [{"from": "human", "value": "a"}]}': "expected .messages., a list.*'human'",
        '{"messages": [{"role": "user", "content": null}]}': "content .* a string, got None",
        '{"messages": [{"role": "user", "content": "1", "weight": 0}]}': "weight.* .0.; remove",
    }
    path = tmp_path / "chat.jsonl"
    path.write_text("\n\n".join([*lines, *bad, lines[0]]))  # with blank lines
    ds = chat(one, path, tokenizer=one.ByteTokenizer(), sequence_length=64)
    assert len(ds) == len(bad) + 4
    text = "user: 1\nassistant: 2$user: 1\nassistant: 2$"  # $ is eod
    ids = [256 if letter == "$" else ord(letter) for letter in text]
    assert ds[-1]["tokens"].tolist() == ids + [256] * (64 - len(ids))
    assert ds[0]["labels"][ds[0]["loss_mask"] == 1].tolist() == [ord("2"), 256] * 2
    for number, words in enumerate(bad.values(), 3):
        with pytest.raises(ValueError, match=rf"chat\.jsonl, line {2 * number + 1}: .*{words}"):
            ds[number]
    for order in ([0, 1, 2, None], [0, 2, 1]):
        _, [message] = heard(list, (ds[k] for k in order))
        assert f"chat.jsonl, line {2 * order[1] + 1}: this sample has no loss" in message
        ds._has_warned = False


def test_what_fine_tuning_refuses(one, tmp_path):
    """A file by its first row, when it is opened; one target for three tokens would be spread."""
    one_target = mock.Mock(return_value=([1, 2, 3], [5]))
    with_start = {"": [5]}.get  # as a BOS around each text, of which this has none
    jsonl(tmp_path / "good.jsonl", [ROW], "messages")
    (tmp_path / "list.jsonl").write_text(json.dumps([{"messages": ROW}], indent=1))
    write_parquet(tmp_path / "text.parquet", {"text": ["a"]})
    write_parquet(tmp_path / "no_lists.parquet", {"messages": ["a"]})
    for name, fields, words in (
        ("compressed.jsonl.GZ", {}, "GZ: .*must not be compressed; decompress it"),
        ("no_lists.parquet", {}, "row 1: expected .messages., a list.*got"),
        ("text.parquet", {}, "text.parquet: cannot be read as Parquet"),
        ("good.jsonl", {"create_attention_mask": True}, "create_attention_mask must be False"),
        ("good.jsonl", {"reset_position_ids": True}, "reset_position_ids must be False"),
        ("good.jsonl", {"sequence_length": 90} | CP_4, "sequence_length: .*multiple of 8 .*t 90"),
        ("good.jsonl", {"n": 3, "documents": np.array([])}, "n: num_samples is 3, .*no rows; give"),
        ("good.jsonl", {"tokenizer": Tok(tokenize=with_start)}, r"\[5\] .* add_special_tokens"),
        ("good.jsonl", {"tokenizer": Tok(eod=None)}, "needs an attribute eod"),
        ("good.jsonl", {"tokenizer": Tok(tokenize_conversation=one_target)}, "1: .*same shape"),
    ):
        with pytest.raises(ValueError, match=words):
            chat(one, tmp_path / name, **fields)[0]
    prefix = mk(one, tmp_path / "pair", [[1]])
    words = "; SFTDataset reads a .jsonl or .parquet file: .*/pair'"
    raises(FileNotFoundError, words, chat, one, prefix)
    os.mkdir(prefix)  # as a cache does
    raises(IsADirectoryError, words, chat, one, prefix)
    for name, words in (("list.jsonl", "line 1: cannot be read: "), ("no_lists.parquet", "row 1")):
        raises(ValueError, words, chat, one, tmp_path / name)
    (tmp_path / "empty.jsonl").touch()
    assert len(chat(one, tmp_path / "empty.jsonl")) == 0
    template = Tok(tokenize=with_start, tokenize_conversation=print)
    chat(one, tmp_path / "good.jsonl", tokenizer=template)
    chat(one, tmp_path / "good.jsonl", sequence_length=9, context_parallel_size=None)


@pytest.mark.filterwarnings("ignore:.* this sample has no loss")
def test_fine_tuning_sets_in_builder_blend_loader_and_resume(one, tmp_path):
    """A run continues, but not with a different file of the same name."""
    rows = [random_row(np.random.default_rng(number), 5) for number in range(20)]
    paths = [jsonl(tmp_path / name, rows, "messages") for name in "ab"]
    cfg = config(one, (paths, [1, 3]), split="8,1,1", tokenizer=ChatTokenizer(pad=999))
    train, valid, test = build(one, [24, 4, 0], cfg, one.SFTDataset)
    assert (len(train), len(valid), len(test)) == (24, 4, 0)
    assert [len(part.indices) for part in (*train.datasets, *valid.datasets)] == [16, 16, 2, 2]
    loader = loader_of(one, train, num_workers=2)
    batches = iter(loader)
    assert next(batches)["cu_seqlens"].shape == (4, 9)
    state = loader.state_dict()
    later = loader_of(one, train)
    later.load_state_dict(state)
    same_batches(list(later), list(batches))
    jsonl(tmp_path / "a", rows[::-1], "messages")
    changed, _, _ = build(one, [24, 4, 0], cfg, one.SFTDataset)
    raises(ValueError, "cannot resume", loader_of(one, changed).load_state_dict, state)


# ==============================================================================
# 22. Audit
# ==============================================================================


def mk_sentences(mm, prefix, rng):
    """A pair whose documents have 0 to 3 sequences, some of which are empty -> its prefix."""
    with mm.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for _ in range(rng.integers(3, 12)):
            lengths = rng.integers(0, 9, rng.integers(0, 4)).tolist()
            builder.add_document(rng.integers(0, 50, sum(lengths)), lengths)
        builder.add_document([7] * 20, [20])
    return str(prefix)


def check_spans(one, ds, k):
    """Check that the spans of a sample are its tokens, in order, and lie where they say."""
    tokens, _ = ds._query_document_sample_shuffle_indices(k)
    pair = ds.dataset
    at = 0
    for span in one.trace(ds, k):
        assert (span.path_prefix, span.sample_offset) == (ds.dataset_path, at) and span.length > 0
        first, last = pair.document_indices[span.document : span.document + 2]
        assert first <= span.sequence < last
        assert span.byte_offset == pair.sequence_pointers[span.sequence] + 2 * span.offset
        read = pair.get(span.sequence, span.offset, span.length)
        assert read.tolist() == tokens[at : at + span.length].tolist()
        at += span.length
    assert set(tokens[at:].tolist()) <= {ds._pad_token_id}


def test_trace_and_find_of_random_blends(one, tmp_path):
    """The blend has parts of two pairs, and one of them twice."""
    for rng in cases(8):
        pairs = [mk_sentences(one, tmp_path / name, rng) for name in "ab"]
        fields = random_parity_flags(rng) | {"stable_order": bool(rng.integers(2))}
        cfg = config(one, ([*pairs, pairs[0]], [1, 3, 1]), split="1,9,0", **fields)
        _, blend, _ = quiet(build, one, [0, int(rng.integers(1, 60)), 0], cfg)
        for part in blend.datasets:
            for k in range(len(part)):
                check_spans(one, part, k)
        for part in blend.datasets:
            part.dataset._tokens = None  # none is read
        wanted = collections.defaultdict(list)
        for i in range(len(blend)):
            part = blend.datasets[blend.dataset_index[i]]
            spans = one.trace(blend, i)
            assert spans == one.trace(part, blend.dataset_sample_index[i]) != []
            for place in {(span.path_prefix, span.sequence) for span in spans}:
                wanted[place].append(i)
        assert one.trace(blend, -1) == spans
        for prefix in pairs:
            for sequence in range(len(one.IndexedDataset(prefix))):
                assert one.find(blend, prefix, sequence) == wanted[prefix, sequence]


def test_a_pair_is_found_by_any_path_that_means_it(one, tmp_path, monkeypatch):
    """Though the job goes to another folder: a relative path then means another place."""
    mk(one, tmp_path / "a", [[1] * 9] * 3)
    monkeypatch.chdir(tmp_path)
    blend = build(one, [9, 0, 0], config(one, (["a", str(tmp_path / "a")], [1, 1])))[0]
    wanted = one.find(blend.datasets[0], "a", 1)
    assert len(wanted) > 0
    for prefix in (tmp_path / "a", f"{tmp_path}/b/../a", "./a"):
        assert one.find(blend.datasets[0], prefix, 1) == wanted
        assert one.find(blend, prefix, 1) == one.find(blend, "a", 1)
    os.mkdir("b")
    monkeypatch.chdir("b")
    assert one.find(blend.datasets[0], "a", 1) == one.find(blend.datasets[0], "../a", 1) == wanted
    words = rf"expected a pair .* \(a, {tmp_path}/a\), got \./a$"
    raises(ValueError, words, one.find, blend, "./a", 1)
    for audit, arguments in ((one.find, ["../a", 9]), (one.trace, [99])):
        for dataset in (blend, blend.datasets[0]):
            raises(IndexError, "9", audit, dataset, *arguments)
        with pytest.raises(ValueError, match="expected a GPTDataset, .*got Subset"):
            audit(torch.utils.data.Subset(blend, [1]), *arguments)


def test_mock_data_is_of_no_file(one):
    ds = build(one, [10, 0, 0], config(one, sequence_length=4096), one.MockGPTDataset)[0]
    [*_, last] = one.trace(ds, 0)
    assert (last.path_prefix, last.byte_offset, last.document) == (None, None, last.sequence)
    assert 0 in one.find(ds, None, last.sequence)


# ==============================================================================
# 23. The command line
# ==============================================================================


def test_commands_by_hand(one, tmp_path, hf, capsys, monkeypatch):
    """In a thread, which leaves signals to others.  Wrong use is a sentence, and leaves no file."""
    monkeypatch.chdir(tmp_path)
    assert command(one, capsys, "--version") == (0, f"{one.__version__}\n", "")
    jsonl("a.jsonl", ["aaaa", "bbb", "cccccc"])
    mk(one, tmp_path / "none", [])
    mk(one, tmp_path / "small", [[257]])
    mk(one, tmp_path / "below", [[-1]])
    with one.IndexedDatasetBuilder("half.bin", np.float32) as builder:
        builder.add_document(torch.tensor([0.5], requires_grad=True), [1])
        builder.finalize("half.idx")
    with one.IndexedDatasetBuilder("modes.bin", multimodal=True) as builder:
        builder.add_document([1, 2, 3], [2, 1], [0, 5])
    mk(one, tmp_path / "damaged", [[1] * 18, [2] * 2])
    patch("damaged.idx", 34, b"\x13")  # the first length
    prefix = "toy_text_document"
    hf_class = "HuggingFaceTokenizer"
    digits = hashlib.md5(pathlib.Path(hf).read_bytes()).hexdigest()[:8]
    inspected = ["13 tokens (uint16)", "3 to 6 tokens, 4.3", "[97, 97, 97, 97]\n", "'aaaa'"]
    preprocess = "preprocess --input a.jsonl --output-prefix"
    shards = "--shard: expected i/n, such as 0/16 to 15/16, got '3/3'"
    for line, wanted, words in (
        ("preprocess --help", 0, ["usage: megatron-min preprocess", "tokenize JSON Lines"]),
        (f"{preprocess} toy", 0, [f"{prefix}: 3 documents", "uint16); ByteTokenizer, without eod"]),
        (f"inspect {prefix}", 0, inspected),
        ("inspect none", 0, ["0 documents, 0 sequences, 0 tokens"]),
        (f"inspect {prefix} --tokenizer null:9", 0, ["than this command's: its class is 'B"]),
        ("inspect small", 0, ["not decoded: some of these tokens are not ids of"]),
        ("inspect below", 0, ["ids of the tokenizer bytes; name the tokenizer of the pair"]),
        ("inspect half", 0, ["[0.5]", "not decoded: some of these tokens"]),
        (f"verify {prefix} modes", 0, [f"OK: {prefix}: 3 ", "OK: modes: 1 document, 2 sequences"]),
        (f"{preprocess} hf --append-eod --tokenizer {hf}", 0, [f"{hf_class} {digits}, with eod"]),
        (f"merge --input {prefix} --input {prefix}.idx --output-prefix m", 0, ["6 sequences, 26 "]),
        (f"inspect {prefix}.bin", 0, inspected),
        (f"verify {prefix}.bin {prefix}.idx", 0, [f"OK: {prefix}: 3 "]),
        ("inspect toy", 1, [prefix, f"megatron-min: {tmp_path}/toy.idx: No such file or direct"]),
        ("merge --input modes --output-prefix q --multimodal", 0, ["2 sequences"]),
        ("", 2, ["COMMAND"]),
        (f"{preprocess} o --no-verbose --json-keys x", 1, ["a.jsonl, line 1: "]),
        ("preprocess", 2, ["required: --input, --output-prefix"]),
        ("merge", 2, ["required: --input, --output-prefix"]),
        (f"{preprocess} o --shard 3/3", 2, [shards]),
        (f"{preprocess} o --workers 0", 2, ["--workers: expected a positive whole number, got"]),
        (f"{preprocess} o --on-error foo", 2, ["argument --on-error: invalid choice: 'foo'"]),
        ("verify small damaged", 1, ["damaged.idx: sequence_pointers[1]"]),
        ("inspect damaged", 1, ["damaged.idx: sequence_pointers[1]"]),
    ):
        before = files_of(".")
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            code, said, err = executor.submit(command, one, capsys, *line.split()).result()
        assert code == wanted, err
        if code > 0:
            *usage, said = err.splitlines()
            assert said.startswith("megatron-min") and (usage == [] or code == 2)
            assert files_of(".") == before
        for word in words:
            assert word in said, line
    assert one.IndexedDataset("q", multimodal=True).sequence_modes.tolist() == [0, 5]


def test_options_of_preprocess_reach_the_function(one, hf, capsys, monkeypatch):
    """Those that are not given have its defaults, but for verbose; given again they add up."""
    made = mock.Mock(return_value={})
    defaults = inspect.signature(one.preprocess).parameters
    monkeypatch.setattr(one, "preprocess", made)
    line = f"preprocess --input x - --input y --output-prefix o --tokenizer {hf} "
    flags = "--json-keys a --append-eod --json-keys b --split-sentences --workers 3 --shard 2/5"
    flags += " --on-error skip --no-verbose --eod-token </s> --add-special-tokens"
    given = {"append_eod": True, "json_keys": ["a", "b"], "split_sentences": True, "workers": 3}
    given |= {"shard": (2, 5), "on_error": "skip", "verbose": False}
    for words, eod, ids, wanted in (
        ("", 3, [1], {"json_keys": ["text"], "verbose": True}),
        (flags, 4, [4, 1], given),
    ):
        assert command(one, capsys, *shlex.split(line + words))[0] == 0
        (inputs, prefix, tokenizer), found = made.call_args
        assert (inputs, prefix) == (["x", "-", "y"], "o")
        assert (tokenizer.eod, tokenizer.tokenize("ja")) == (eod, ids)
        assert found == {name: defaults[name].default for name in given} | wanted


def test_a_warning_points_to_the_line_of_the_user(one):
    """Not to ours, nor to a line of an installed library, which called us."""
    library = pathlib.Path(torch.__file__).parents[1] / "lib.py"
    names = {"warn": functools.partial(one._inputs_of_shard, [one._Input("a", 0)], 0, 2)}
    exec(compile("def call():\n    warn()", str(library), "exec"), names)
    with pytest.warns(UserWarning, match="unequal") as caught:
        names["call"]()
    assert caught[0].filename == __file__


def test_an_error_and_a_warning_are_a_line_each(one, capsys, monkeypatch):
    def merge(*arguments):
        warnings.warn("a  warning\nof  two lines", stacklevel=1)
        raise ZeroDivisionError("a  bad\nvalue")

    monkeypatch.setattr(one, "merge", merge)
    code, _, err = command(one, capsys, *"merge --input p --output-prefix q".split())
    wanted = ["warning: a warning of two lines", "megatron-min: ZeroDivisionError: a bad value"]
    assert (code, err.splitlines()) == (1, wanted)


def test_a_console_that_cannot_show_a_character(one, tmp_path, capsys, monkeypatch):
    """It shows an escape, of a path as of a text, and the command goes on to its end."""
    prefix = mk(one, tmp_path / "日é", [list("日é".encode())], np.uint8)
    console = io.TextIOWrapper(io.BytesIO(), "cp1252", newline="\n")
    monkeypatch.setattr(sys, "stdout", console)
    assert command(one, capsys, "inspect", prefix)[0] == 0
    first, *_, last = console.buffer.getvalue().decode("cp1252").splitlines()
    assert "/\\u65e5é: 1 document, 1 sequence, " in first and last == "as text: '\\u65e5é'"


@linux
@pytest.mark.parametrize("is_ignored", [False, True])
@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_unwinds_a_command(one, tmp_path, capsys, monkeypatch, name, code, is_ignored):
    """No file is left, and there is no message; one that was ignored before stays ignored."""

    def act(text):
        try:
            os.kill(os.getpid(), getattr(signal, name))
        except SystemExit:  # what a signal stops may raise another error
            raise RuntimeError("cannot join thread before it is started") from None

    monkeypatch.setattr(one, "build_tokenizer", mock.Mock(return_value=acting(act)))
    path = jsonl(tmp_path / "a.jsonl", ["1"])
    handler = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    before = signal.signal(getattr(signal, name), handler)
    argv = ["preprocess", "--input", path, "--output-prefix", tmp_path / "o", "--no-verbose"]
    found, _, err = command(one, capsys, *argv)
    assert signal.signal(getattr(signal, name), before) is handler
    assert (found, err) == (0 if is_ignored else code, "")
    assert len(os.listdir(tmp_path)) == (4 if is_ignored else 1)


def test_the_demo_of_the_file_as_a_program(tmp_path, capsys, monkeypatch):
    """It resumes, leaves nothing, and ends with a command that its user can type."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["megatron_min.py", "demo"])
    raises(SystemExit, "^0$", runpy.run_path, str(HERE / "megatron_min.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert re.findall(r"^[0-9N].*?[.,]", out, re.MULTILINE) == ["1.", "2.", "3.", "4.", "Next,"]
    assert "600 samples of 256 tokens" in out
    assert "70 batches, identical to an uninterrupted run: True\n" in out
    python = os.path.basename(sys.executable)
    assert out.splitlines()[-1].startswith(f"{python} {HERE}/megatron_min.py preprocess --input ")
    assert os.listdir(tmp_path) == []


def test_a_command_has_the_name_by_which_it_was_started(one, capsys, monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for module, path, words in (
        (None, "/bin/megatron-min", "megatron-min"),
        ("mine.data", "/me/mine/data.py", f"{os.path.basename(sys.executable)} -m mine.data"),
    ):
        main.__spec__ = module and importlib.machinery.ModuleSpec(module, None)
        for argv, wanted in (([], f"usage: {words} "), (["verify", "none"], f"{words}: ")):
            monkeypatch.setattr(sys, "argv", [path, *argv])
            with contextlib.suppress(SystemExit):
                one.main()
            assert capsys.readouterr().err.startswith(wanted)


BARE_PLATFORM = """
import multiprocessing, os, signal, sys
import torch, torch.utils.data
for name in ("fcntl", "resource", "gigatoken", "nltk", "pyarrow", "s3fs", "tokenizers", "tqdm"):
    sys.modules[name] = None
for name in {"pread", "fork", "forkpty", "sched_getaffinity", "mkfifo"} & set(dir(os)):
    delattr(os, name)
del signal.SIGHUP
sys.platform = "darwin"
multiprocessing.set_start_method("spawn", force=True)
import megatron_min as mm

if __name__ == "__main__":
    mm.preprocess(None, "out", "beside:Tokenizer", texts=["a text"] * 99, workers=2)
    sys.exit(mm.main(["demo"]))
"""


@pytest.mark.slow
def test_platforms_without_fcntl_and_fork(tmp_path, monkeypatch):
    """Spawned workers find a module in the current folder; no package of an extra is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "job.py").write_text(BARE_PLATFORM)
    module = "import megatron_min\nclass Tokenizer(megatron_min.ByteTokenizer): pass\n"
    (tmp_path / "beside.py").write_text(module)
    assert "uninterrupted run: True" in "\n".join(run_script("program/job.py"))


def test_a_list_is_read_as_prefixes_and_weights(one):
    """Weights and prefixes in turn, or prefixes alone; numbers are decimal numbers."""
    read = one.get_blend_from_list
    assert read([30, "p1", 0.5, pathlib.Path("p2")]) == (["p1", "p2"], [30.0, 0.5])
    assert read([" 1e-3 ", " p1 "]) == (["p1"], [0.001])
    names = ["2023_01", "inf", "nan", "./2023"]  # float() takes each but the last for a number
    assert read(names) == (names, None)
    # upstream pairs these anyway, or takes weights for prefixes
    wrong_lists = {"0.3 A B C": "0", "0.3 A 0.7": "0, 2", "": "", "A 1": "1", "1 2": "0, 1"}
    for wrong, at in wrong_lists.items():
        words = rf"^blend: .* got {len(wrong.split())} .* indices \[{at}\]; .* as ./2023$"
        raises(ValueError, words, read, wrong.split())


# -- Programs: they begin, end and are stopped as a user's do, but import torch once for all -----


PROGRAMS = """
import gc, json, os, signal, sys, threading, time
import megatron_min as mm
gc.freeze()  # so that a program ends sooner
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
def preprocess(*words):
    line = "preprocess --input a.jsonl --output-prefix o --no-verbose --workers 2"
    sys.exit(mm.main([*line.split(), *words]))
for line in sys.stdin:
    program = os.fork()
    if program == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        exec(json.loads(line))
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def programs():
    """The process of PROGRAMS: it is told lines of Python, and tells the exit code."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PROGRAMS], cwd=HERE, **pipes) as process:
        yield process


UNFINISHED = """
mm.warnings.simplefilter("always")  # of files that nobody closes
mm._NewFile("g")
new_file = mm._NewFile("f")
builder = mm.IndexedDatasetBuilder("q.bin")
mm.tempfile.tempdir = os.getcwd()
toy = mm.toy_corpus()
with mm.IndexedDatasetBuilder("o.bin") as pair:
    pair.add_document([1], [1])
    if os.fork() == 0:
        sys.exit()
    os.wait()
mm.IndexedDataset("o", check=True)
mm.IndexedDataset(toy, check=True)
os.chdir("/")
"""
FULL_DISK = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1); preprocess()"
CLOSED_PIPE = "reader, writer = os.pipe(); os.dup2(writer, 1); os.close(reader); preprocess()"
AT_A_FORK = """
def signal_once():
    if not os.path.exists("seen"):
        open("seen", "x").close()
        os.kill(os.getpid(), signal.SIGTERM)
os.register_at_fork(before=signal_once)
threading.Thread(target=time.sleep, args=[60], daemon=True).start()
preprocess()
"""
IN_A_DEL = """
sys.unraisablehook = print  # of what is raised there
class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
def make():
    Last()
    return mm.ByteTokenizer()
preprocess("--workers", "1", "--tokenizer", "__main__:make")
"""
KILLED_BY_A_WORKER = """
class Killing(mm.ByteTokenizer):
    def tokenize_batch(self, texts):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)  # in the middle of a block
os.mkdir("out")
preprocess("--output-prefix", "out/o", "--tokenizer", "__main__:Killing")
"""
NO_ROOM = f"megatron-min: {os.strerror(errno.ENOSPC)}\n"
MADE = ["o_text_document.bin", "o_text_document.idx", "o_text_document.record.json"]
ENDS = {  # lines, the exit code, files, what stands on stderr
    # A forked process leaves the files of the one that forked it.
    "files that are not finished go": (UNFINISHED, 0, ["o.bin", "o.idx"], ""),
    "no room for what is printed": (FULL_DISK, 1, MADE, NO_ROOM),
    "its reader has seen enough": (CLOSED_PIPE, 0, MADE, ""),
    # Python drops what is raised in a thread that forks.
    "a signal while a worker is started": (AT_A_FORK, 143, ["seen"], ""),
    "a signal inside of a __del__": (IN_A_DEL, 143, MADE, ""),
    "the command is killed, and not its workers": (KILLED_BY_A_WORKER, -9, ["out"], ""),
}


@linux
@pytest.mark.parametrize("case", ENDS)
def test_how_a_program_ends(programs, tmp_path, case):
    """With its exit code, what it has made whole, and no other file or process."""
    lines, code, files, messages = ENDS[case]
    jsonl(tmp_path / "a.jsonl", ["abc"])
    os.mkfifo(tmp_path / "messages")
    first = f"os.chdir({os.fspath(tmp_path)!r})\nos.dup2(os.open('messages', os.O_WRONLY), 2)\n"
    programs.stdin.write(json.dumps(first + lines) + "\n")
    programs.stdin.flush()
    read = ["cat", tmp_path / "messages"]  # until no process has it open any more
    found = subprocess.run(read, capture_output=True, text=True, timeout=300).stdout
    assert (int(programs.stdout.readline()), found) == (code, messages)
    assert sorted(os.listdir(tmp_path)) == sorted(["a.jsonl", "messages", *files])


# ==============================================================================
# Parity with megatron-core 0.16.1
# ==============================================================================
# Every test here runs one thing twice, with our names (mm or one) and with upstream's (up), and
# compares all that comes of it.


def test_splits_and_blends_equal_upstreams(one, up):
    """Shares of which at least one is not 0, and what is missing is 0; paths with weights."""
    for blend in (None, ["a"], ["a", "b", "c"], ["1", "a"], ["0.3", "a", "7e1", "b"]):
        assert one.get_blend_from_list(blend) == up.get_blend_from_list(blend)
    for rng in cases(300):
        shares = np.where(rng.random(3) < 0.8, rng.integers(0, 100, 3), 0) + [1, 0, 0]
        if rng.random() < 0.5:
            shares = rng.random(3).round(3)
        text = ",".join(str(share) for share in shares[: rng.integers(1, 4)])
        assert one.parse_and_normalize_split(text) == up.parse_and_normalize_split(text)


# The differences, as README has them.
OTHER_ARGUMENTS = {"DistributedDataParallel", "finalize_model_grads"}
OTHER_ARGUMENTS |= {"forward_backward_no_pipelining", "get_batch_on_this_cp_rank"}
NOT_TAKEN = ["s3_config", "fast_cache_load", "sequences_per_dataset", "dtype_code"]
OTHER_DEFAULTS = {"path_to_idx_cache", "bin_chunk_nbytes"}
# Of names that the package lacks: upstream's, as its repository has them.
ARGUMENTS_BY_HAND = {
    "MegatronPretrainingSampler": "total_samples consumed_samples micro_batch_size "
    "data_parallel_rank data_parallel_size drop_last",
    "MegatronPretrainingRandomSampler": "dataset total_samples consumed_samples micro_batch_size "
    "data_parallel_rank data_parallel_size data_sharding seed",  # the last is ours
    "MegatronFullValidationSampler": "total_samples data_parallel_rank data_parallel_size",
    "build_pretraining_data_loader": "dataset consumed_samples",
    "SFTDataset": "dataset dataset_path indices num_samples index_split config",
}


def arguments_of(function, *but):
    """{name: default, as text} of each argument, but those of a kind, in their order."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: str(one.default) for one in parameters if one.kind not in but}


def functions_of(cls):
    """{name: function} of a class; of __init__() see the class itself."""
    special = {"__getitem__", "__len__", "__next__", "_query_document_sample_shuffle_indices"}
    found = dict(inspect.getmembers(cls, inspect.isroutine))
    return {name: found[name] for name in found if name in special or not name.startswith("_")}


def test_public_names_and_their_arguments_are_upstreams(one, up):
    """__all__ is grouped by origin; our own arguments can be given by keyword alone."""
    theirs = dict(vars(up))
    modules = ["distributed", "pipeline_parallel.schedules", "rerun_state_machine", "utils"]
    modules.append("tokenizers.text.libraries.null_tokenizer")
    for module in modules:
        theirs |= vars(importlib.import_module(f"megatron.core.{module}"))
    block = re.search(r"^__all__ = \[\n(.*?)^\]", inspect.getsource(one), re.M | re.S)[1]
    _, *groups = re.split(r"^    # .+$", block, flags=re.M)
    of_package, of_repository, ours = (re.findall(r'"(\w+)"', group) for group in groups)
    assert of_package + of_repository + ours == one.__all__
    assert set(of_package) == set(one.__all__) & set(theirs)
    assert set(ARGUMENTS_BY_HAND) < set(of_repository)
    pairs = {}
    for name in of_package:
        ours, other = getattr(one, name), theirs[name]
        if "pybind11" in repr(other) or name in ("DType", "Split"):
            continue  # the first do not say what they take, and enumerations take nothing
        pairs[name] = ours, other
        if inspect.isclass(other) and name not in OTHER_ARGUMENTS:
            methods = functions_of(ours)
            for method, of_theirs in functions_of(other).items():
                if method in methods:
                    pairs[f"{name}.{method}"] = methods[method], of_theirs
    differing = set()
    for name, (ours, other) in pairs.items():
        wanted = arguments_of(other)
        found = arguments_of(ours, inspect.Parameter.KEYWORD_ONLY)
        for key in NOT_TAKEN if name == "IndexedDataset" else []:
            del wanted[key]
        for key in OTHER_DEFAULTS & wanted.keys():
            wanted[key] = found[key]
        if list(found.items()) != list(wanted.items()):
            differing.add(name)
    assert differing == OTHER_ARGUMENTS
    assert len(pairs) > 55


def test_arguments_are_those_of_upstreams_repository(one):
    for name, wanted in ARGUMENTS_BY_HAND.items():
        found = arguments_of(getattr(one, name), inspect.Parameter.KEYWORD_ONLY)
        assert list(found) == wanted.split(), name
    options = arguments_of(one.build_pretraining_data_loader)
    assert (options["data_sharding"], options["drop_last"]) == ("True", "True")  # as upstream's
    assert options["num_workers"] == "0"


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
            builder.add_document(tokens, [cut, len(doc) - cut], modes if multimodal else None)
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


def test_files_equal_upstreams(one, up, tmp_path):
    """Equal byte for byte, and each side reads what the other has written."""
    for case, rng in enumerate(cases(12)):
        multimodal = case % 2 == 1
        dtype = rng.choice([np.uint8, np.int16, np.uint16, np.int32, np.int64])
        docs = [rng.integers(0, 100, rng.integers(0, 9)) for _ in range(rng.integers(1, 20))]
        docs.append(np.array([5]))
        job = docs, dtype, multimodal
        ours = write_somehow(one, tmp_path / "ours", *job, copy.deepcopy(rng))
        theirs = quiet(write_somehow, up, tmp_path / "theirs", *job, rng)
        assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
        by_us = one.IndexedDataset(theirs, multimodal)
        by_them = up.IndexedDataset(ours, multimodal=multimodal)
        for place in (*range(len(by_them)), slice(None)):
            assert repr(by_us[place]) == repr(by_them[place]), (case, place)  # dtypes too
        same(by_us.get_document_indices(), by_them.get_document_indices(), case)
        del by_us, by_them  # the next case writes over their files


# -- Datasets ----------------------------------------------------------------------------------


def same_items(ours, theirs, indices, note=""):
    """These samples of two datasets, alone and, of ours, as one batch."""
    theirs.masks_and_position_ids_are_cacheable = False  # else one sample's masks are in the next
    wanted = [quiet(theirs.__getitem__, k) for k in indices]
    for k, sample in zip(indices, wanted, strict=True):
        if "dataset_id" in sample:  # upstream: an int16, which gloo cannot send
            sample["dataset_id"] = torch.tensor(int(sample["dataset_id"]))
        same_samples(quiet(ours.__getitem__, k), sample, (note, k))
    if wanted:
        batch = torch.utils.data.default_collate(wanted)
        same_samples(quiet(batch_of, ours, indices), batch, note)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_datasets_equal_upstreams(mm, up, tmp_path, split):
    """Upstream raises an error if a kept short sample ends in an empty document, with x = 1."""
    caches = [str(tmp_path / side) for side in ("ours", "theirs")]
    tokenizers = [tokenizer for tokenizer, _, _ in PADS.values()] + [LegacyTokenizer()]
    for case, rng in enumerate(cases(15)):
        docs = [np.array([1, 2, 3])]
        for doc in random_docs(rng, vocab=int(rng.choice([10, 10, 250]))):
            docs.append(np.append(doc, 0) if rng.random() < 0.6 else doc)
        dtype = rng.choice([np.uint8, np.int16, np.uint16, np.int32, np.int64])
        prefix = mk(mm, tmp_path / f"pair{case}", docs, dtype)
        flags = random_parity_flags(rng)
        flags["tokenizer"] = tokenizers[case % len(tokenizers)]
        flags["allow_ambiguous_pad_tokens"] = bool(rng.integers(2))
        epoch = sum(map(len, docs)) // flags["sequence_length"]
        n = [None, 1, epoch, int(epoch * 1.8), rng.integers(1, 3 * epoch + 2)][rng.integers(5)]
        n = None if n is None else max(1, int(n))
        ours = quiet(gpt, mm, prefix, n, split, path_to_cache=caches[0], **flags)
        try:
            theirs = quiet(gpt, up, prefix, n, split, path_to_cache=caches[1], **flags)
        except AssertionError:
            assert split == "valid" and len(docs[ours.document_index[-1]]) == 0
            continue
        assert len(ours) == len(theirs)
        same_arrays(arrays(ours), arrays(theirs), case)
        if len(ours):
            some = rng.integers(0, len(ours), 6).tolist()
            same_items(ours, theirs, some, case)
            both = [ds._query_document_sample_shuffle_indices(some[0]) for ds in (ours, theirs)]
            same_arrays(*both, case)
            same_samples(quiet(ours.__getitem__, None), quiet(theirs.__getitem__, None), case)


class LegacyTokenizer(Tok):
    """A tokenizer of upstream's old kind: it raises an error if it is asked for pad."""

    pad = property(mock.Mock(side_effect=NotImplementedError))


def test_mock_datasets_equal_upstreams(one, up):
    built = []
    for names in (one, up):
        cfg = config(names, sequence_length=2000, tokenizer=Tok(36, 37))
        built.append(quiet(build, names, [9, 2, 1], cfg, names.MockGPTDataset))
    same_built(*built)
    for ours, theirs in zip(*built, strict=True):
        same_arrays(arrays(ours), arrays(theirs))


# -- The builder and the cache -----------------------------------------------------------------


def same_built(ours, theirs, note=""):
    """What the two builders made: for each split None, a dataset, a list of them, or a blend."""
    for mine, other in zip(ours, theirs, strict=True):
        assert type(mine).__name__ == type(other).__name__, note
        if isinstance(mine, list):
            same_built(mine, other, note)
        elif mine is not None:
            assert len(mine) == len(other), note
            same_items(mine, other, list(range(0, len(mine), max(1, len(mine) // 4))), note)
            if hasattr(mine, "datasets"):
                same_built(mine.datasets, other.datasets, note)


def random_corpora(rng, prefixes):
    """Up to five of the prefixes, with weights or without."""
    n = int(rng.integers(1, 6))
    chosen = [str(prefix) for prefix in rng.choice(prefixes, n, replace=False)]
    weights = rng.choice([rng.dirichlet(np.ones(n)) + 0.05, rng.integers(1, 5, n)]).tolist()
    return chosen, weights if rng.random() < 0.5 else None


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
    blends = [random_corpora(rng, prefixes) for _ in range(3)]
    blends[rng.choice([0, 2])] = None
    fields["blend_per_split"] = blends
    fields["full_validation"] = bool(rng.integers(2))
    corpora, weights = blends[1]
    if weights is None:
        fields["multiple_validation_sets"] = len(corpora) > 1 and rng.random() < 0.6
        if fields["full_validation"]:
            sizes[1] = None
    return sizes, fields


WAYS_TO_BUILD = [
    {"fast_cache_load": True, "defer_npy_index_mmap": True, "num_dataset_builder_threads": 3},
    {"fast_cache_load": True, "sequences_per_dataset": {}},
    {"mmap_bin_files": False, "defer_npy_index_mmap": True},
    {"context_parallel_size": 2, "data_parallel_size": 4, "sequence_parallel_size": 2},
    {"object_storage_cache_path": None, "hybrid_context_parallel": False},
]


def test_built_datasets_and_caches_equal_upstreams(one, up, tmp_path, group):
    """Each then builds from the other's cache, to which we add manifests, and upstream nothing."""
    counts = {}
    rng = np.random.default_rng(21)
    for name in "abcdef":
        docs = [rng.integers(1, 50, rng.integers(1, 40)) for _ in range(rng.integers(30, 90))]
        prefix = mk(one, tmp_path / "corpora" / name, docs, np.uint16)
        counts[prefix] = len(docs), len(docs) + 1
    for case, rng in enumerate(cases(12)):
        sizes, fields = random_build(rng, list(counts))
        fields["tokenizer"] = LegacyTokenizer()
        again = fields | WAYS_TO_BUILD[case % len(WAYS_TO_BUILD)]
        if "sequences_per_dataset" in again:
            again["sequences_per_dataset"] = counts
        if "blend" in fields:  # upstream trusts the cache of a blend for each split alone
            again["fast_cache_load"] = False
        note = case, sizes, again
        caches = [str(tmp_path / f"{case}{side}") for side in ("ours", "theirs")]
        ours = quiet(build, one, sizes, config(one, path_to_cache=caches[0], **fields))
        theirs = quiet(build, up, sizes, config(up, path_to_cache=caches[1], **fields))
        same_built(ours, theirs, note)
        files, arrays = (files_of(cache) for cache in caches)
        manifests = {name for name in files if name.endswith("-manifest.json")}
        assert arrays == {name: files[name] for name in files.keys() - manifests}, note
        before = stamps(caches[0])
        theirs = quiet(build, up, sizes, config(up, path_to_cache=caches[0], **again))
        assert stamps(caches[0]) == before, note
        ours = quiet(build, one, sizes, config(one, path_to_cache=caches[1], **again))
        same_built(ours, theirs, note)
        assert files_of(caches[1]).keys() == arrays.keys() | manifests, note
        assert arrays.items() <= files_of(caches[1]).items(), note


def test_groups_of_ranks_equal_upstreams(one, up):
    state = importlib.import_module("megatron.core.parallel_state")
    for rng in cases(300):
        tp, cp, dp, pp = rng.integers(1, 6, 4).tolist()
        theirs = state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
        sizes = {"tensor": tp, "context": cp, "data": dp, "pipeline": pp}
        kind = "-".join(rng.permutation(["tp", "cp", "dp", "pp"])[: rng.integers(1, 5)])
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
        theirs = up.calculator.RampupBatchsizeNumMicroBatchesCalculator
        theirs = theirs(final, micro, ranks, False, 0, start, increment, samples)
        more = rng.integers(0, samples + 50, 20).tolist()
        for consumed in sorted({0, samples, samples + 1, *more}):
            ours.update(consumed)
            theirs.update(consumed, True)
            found = ours.get(), ours.get_current_global_batch_size()
            wanted = theirs.get(), theirs.get_current_global_batch_size()
            assert found == wanted, (final, micro, ranks, start, increment, samples, consumed)


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
# README
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


@pytest.fixture
def inputs(one, readme, tmp_path, monkeypatch):
    """{name of an input: its texts}, in a folder where README's scripts are, and can run."""
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "megatron_min", one)
    monkeypatch.setitem(sys.modules, "pretrain", None)  # so it is not left there
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(["def a(self):"], 270, 1, special_tokens=["<|endoftext|>"])
    for folder in ("tokenizer", "wiki", "books"):
        os.mkdir(folder)
    trained.save("tokenizer/tokenizer.json")
    texts = [text[:2000] for text in inspect.getsource(one).split("\n\n\n")]
    inputs = {}
    for number, corpus in enumerate(("wiki", "books", "wiki")):
        name = f"{corpus}/{number}.jsonl.gz"
        inputs[name] = texts[number::3]
        with gzip.open(name, "wt") as file:
            file.write("\n\n".join(json.dumps({"text": text}) for text in inputs[name]))
    for line in readme_block(readme, "sh", "--output-prefix wiki").splitlines():
        if line.startswith("megatron-min "):
            assert one.main(shlex.split(line)[1:]) == 0
    for name in ("pretrain.py", "documents.py", "train.py"):
        pathlib.Path(name).write_text(readme_block(readme, "python", f'"""python {name}'))
    return inputs


def run_here(capsys, path, *arguments):
    """Run a script, which may import pretrain.py anew: its names, and the lines that it prints."""
    sys.modules.pop("pretrain", None)
    capsys.readouterr()
    with mock.patch.object(sys, "argv", [path, *arguments]):
        return runpy.run_path(path, run_name="__main__"), capsys.readouterr().out.splitlines()


def change(path, *changes):
    """Replace text in a script of README; each old text must be there once."""
    script = pathlib.Path(path).read_text()
    for old, new in changes:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    pathlib.Path(path).write_text(script)


def test_readmes_pretrain_and_documents_as_they_stand(one, readme, inputs, capsys, monkeypatch):
    """A run is stopped, and continues with equal batches; its documents are the input lines."""
    read = []  # the labels of each step
    stops = {50}
    cross_entropy = torch.nn.functional.cross_entropy

    def look_on(logits, labels, **arguments):
        if torch.is_grad_enabled():
            read.append(labels.view(8, 64))
        if len(read) in stops:
            raise InterruptedError
        return cross_entropy(logits, labels, **arguments)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", look_on)
    raises(InterruptedError, None, run_here, capsys, "pretrain.py")
    printed = capsys.readouterr().out
    stops.clear()
    del read[40:]  # what was read after the last checkpoint
    names, lines = run_here(capsys, "pretrain.py")
    train, tokenizer = names["train"], names["tokenizer"]
    first = f"{train}\n{tokenizer.detokenize(train[0]['tokens'])}\n"
    assert printed.startswith(f"{first}step 19, samples 152 to 159: validation loss ")
    begin = [*str(train).splitlines(), "continuing at step 40 of 100"]
    assert lines[: len(begin)] == begin
    steps = ["step 59, samples 472 to 479", "step 79, samples 632 to 639"]
    steps.append("step 99, samples 792 to 799")
    assert [line.partition(":")[0] for line in lines[len(begin) :]] == steps
    assert len(read) == 100 and sorted(train.samples_taken().tolist()) == [240, 560]
    for step, labels in enumerate(read):
        same(labels, batch_of(train, range(8 * step, 8 * step + 8))["labels"])

    wanted = []
    for k in range(17 * 8, 18 * 8):
        tokens = []
        for span in one.trace(train, k):
            document = tokenizer.tokenize(inputs[span.input][span.input_document])
            document.append(tokenizer.eod)
            part = document[span.offset : span.offset + span.length]
            text = repr(tokenizer.detokenize(part)[:60])
            wanted.append(f"{k} {span.input} {span.input_document} {text}")
            tokens += part
        same(torch.tensor(tokens)[1:], read[17][k - 17 * 8])
    assert run_here(capsys, "documents.py", "136", "143")[1] == wanted
    raises(SystemExit, "python documents.py FIRST", run_here, capsys, "documents.py")
    [shown] = re.findall(r"`(zcat -f .+? 72p)`", readme)
    document = shown.replace("72p", "3p").replace("wiki/0", "books/1")
    done = subprocess.run(document, shell=True, stdout=-1, check=True)
    assert json.loads(done.stdout)["text"] == inputs["books/1.jsonl.gz"][2]
    assert run_here(capsys, "pretrain.py")[1][len(begin) - 1 :] == ["continuing at step 100 of 100"]

    change("pretrain.py", ("seed=1234", "seed=5"))
    raises(ValueError, "seed", run_here, capsys, "documents.py", "136", "143")


@pytest.mark.slow
def test_readmes_common_tasks(inputs, capsys):
    """A longer run with larger batches; one epoch; several epochs, each shuffled anew."""
    change("pretrain.py", ("S = 100, 8,", "S = 20, 8,"), ("95,5,0", "100,0,0"))
    _, lines = run_here(capsys, "pretrain.py")
    assert lines[-1] == "step 19, samples 152 to 159: validation loss nan"
    change("pretrain.py", ("S = 20, 8,", "S = 20, 24,"))  # 160 samples are not full batches
    _, lines = run_here(capsys, "pretrain.py")
    assert "continuing at step 7 of 20" in lines and "step 19, samples 448 to 471" in lines[-1]
    assert torch.load("checkpoint.pt")["loader"]["consumed_samples"] == 160 + 13 * 24
    assert run_here(capsys, "pretrain.py")[1][-1] == "continuing at step 20 of 20"
    change("pretrain.py", ("S = 20, 24,", "S = 20, 16,"), ("100,0,0", "95,5,0"))

    model = "    model = make_model()"
    sizes = ("[steps * batch_size, 4 * batch_size, 0]", "[None, None, 0]")
    change("pretrain.py", ("[70, 30]", "None"), sizes)
    change("pretrain.py", (model, f"    steps = len(loader)\n{model}"))
    os.remove("checkpoint.pt")
    names, _ = run_here(capsys, "pretrain.py")
    assert names["train"].samples_taken().tolist() == [len(d) for d in names["train"].datasets]
    consumed = names["loader"].consumed_samples
    assert 0 <= len(names["train"]) - consumed < 16 and consumed == 16 * names["steps"]

    share = "batch_size // ranks, **share"
    cyclic = share + ', dataloader_type="cyclic", data_sharding=False'
    change("pretrain.py", (share, cyclic), ("import BlendedM", "import cyclic_iter, BlendedM"))
    change("pretrain.py", ("(start, steps), loader", "(start, steps), cyclic_iter(loader)"))
    change("pretrain.py", ("steps = len(loader)", "steps = 2 * len(loader)"))
    os.remove("checkpoint.pt")
    names, _ = run_here(capsys, "pretrain.py")
    consumed = torch.load("checkpoint.pt")["loader"]["consumed_samples"]
    assert consumed == 16 * names["steps"] > len(names["train"])


@pytest.mark.slow
def test_readmes_fine_tuning(readme, inputs, capsys):
    """pretrain.py with its edits reads the rows in order, is stopped, and continues."""
    for name, texts in zip(("chats.jsonl", "more.jsonl"), inputs.values(), strict=False):
        rows = [[("user", text[:9]), ("assistant", text[9:40])] for text in texts]
        jsonl(name, [[{"role": role, "content": c} for role, c in row] for row in rows], "messages")
    [blend] = re.findall(r"`(blend=.+chats.+)`, the", readme)
    for word in ("Builder, {},", "Builder({},"):
        change("pretrain.py", (word.format("GPTDataset"), word.format("SFTDataset")))
    corpora = '(["wiki_text_document", "books_text_document"], [70, 30])'
    change("pretrain.py", (f"blend={corpora}", blend))
    change("pretrain.py", ("S = 100, 8,", "S = 20, 8,"))
    assert "step 19, samples 152 to 159" in run_here(capsys, "pretrain.py")[1][-1]
    change("pretrain.py", ("S = 20, 8,", "S = 40, 8,"))
    names, lines = run_here(capsys, "pretrain.py")
    assert "continuing at step 20 of 40" in lines and "step 39, samples 312 to 319" in lines[-1]
    train, k = names["train"], 17
    part = train.datasets[train.dataset_index[k]]
    i = train.dataset_sample_index[k]
    row = part.dataset[int(part.indices[i % len(part.indices)])]
    text = names["tokenizer"].detokenize(train[k]["tokens"])
    assert text.startswith("user: " + row["messages"][0]["content"])


def test_readmes_expressions(one, readme, tmp_path):
    """For whole epochs, for a step of "cyclic", and for a pair without a record."""
    prefix = mk(one, tmp_path / "p", [np.arange(n) for n in range(1, 30)])

    def train_of(num_samples, *prefixes):
        return build(one, [num_samples, 0, 0], config(one, (prefixes, None), split="90,10,0"))[0]

    train = train_of(None, prefix)
    [num_tokens] = re.findall("num_tokens is\\s`(.+?)`", readme)
    for epochs in (1, 3):
        count = one.count_samples(epochs * eval(num_tokens), 8)
        for more in (0, 1):
            assert train_of(count + more, prefix).epoch_plan.num_epochs == epochs + more
    once = train_of(None, prefix, prefix)
    assert once.samples_taken().tolist() == [len(train), len(train)]
    [numbers] = re.findall(r"`(next\(itertools.+)`", readme)
    for step in (0, 4):
        cyclic = {"micro_batch_size": 3, "dataloader_type": "cyclic"}
        loader = one.build_pretraining_data_loader(once, 0, **cyclic)
        wanted = batch_of(once, eval(numbers))
        same(next(itertools.islice(loader, step, None))["tokens"], wanted["tokens"])
    [is_below] = re.findall("`(IndexedDataset.+ < vocab_size)`", readme)
    for vocab_size in (28, 29):  # the highest id is 28
        names = vars(one) | {"prefix": prefix, "vocab_size": vocab_size}
        assert eval(is_below, names) == (vocab_size == 29)


def test_readmes_shards_merge_to_the_pair_of_one_job(one, readme, tmp_path, monkeypatch):
    """By its lines for Slurm."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("books")
    for k in range(16):
        jsonl(f"books/{k:02}.jsonl", [chr(97 + k)] * 3)
    whole = one.preprocess("books/*.jsonl", "whole", append_eod=True)["text"]
    part, _, merge = readme_block(readme, "sh", "srun").splitlines()
    _, *part = shlex.split(part.removeprefix("part=")[1:-1])
    _, *merge = shlex.split(merge, comments=True)
    for i in range(16):
        assert one.main([*part, f"{i}/16"]) == 0
    merge[2:3] = sorted(glob.glob(merge[2]))
    assert one.main(merge) == 0
    assert bytes_of_pair("books_text_document") == bytes_of_pair(whole)


def command_of(path, ranks):
    """The words that run a script, by torchrun if ranks is not 0; its first rank alone prints."""
    launcher = []
    if ranks:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-ranks-filter", "0"]
        launcher += ["--nproc-per-node", str(ranks)]
    return [sys.executable, *launcher, path]


def run_script(path, *arguments, ranks=0, **variables):
    """Run a script in the current folder: the lines that it prints."""
    env = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"} | variables
    run = [*command_of(path, ranks), *arguments]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_training_script_has_equal_losses_on_1_2_and_4_ranks(inputs):
    """train.py learns, and is not run by worker processes."""
    change("pretrain.py", ("S = 100,", "S = 60,"))
    lines = run_script("train.py")
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(losses) == 3 and losses[-1] < losses[0]
    for ranks, layout in ((2, {}), (4, {"TP": "2", "CP": "2"})):
        assert run_script("train.py", ranks=ranks, **layout) == lines, layout
    begin = "import multiprocessing as mp\nmp.set_start_method('forkserver', force=True)\n"
    change("train.py", ("import os\n", begin + "import os\n"))  # as from 3.14 on
    change("train.py", ("=micro_batch, **share)", "=micro_batch, num_workers=1, **share)"))
    assert run_script("train.py", MEGATRON_MIN_C="0") == lines


@pytest.mark.slow
def test_training_script_of_two_processes_continues_with_one_or_four(inputs):
    """pretrain.py by torchrun is stopped, and continues; its losses are those of one process."""
    wanted = run_script("pretrain.py")
    model = torch.load("checkpoint.pt")
    documents = run_script("documents.py", "136", "143")
    os.remove("checkpoint.pt")
    env = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    lines = []
    with subprocess.Popen(command_of("pretrain.py", 2), env=env, stdout=-1, text=True) as process:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("step 39,"):
                process.terminate()
    assert lines[:-1] + wanted[len(lines) - 1 :] == wanted or lines == wanted[: len(lines)]
    change("pretrain.py", ("S = 100,", "S = 80,"))
    run_script("pretrain.py", ranks=4)
    change("pretrain.py", ("S = 80,", "S = 100,"))
    *_, stopped, last = run_script("pretrain.py", ranks=1)
    assert (stopped, last) == ("continuing at step 80 of 100", wanted[-1])
    found = torch.load("checkpoint.pt")
    assert found["loader"] == model["loader"]
    torch.testing.assert_close(found["model"], model["model"], rtol=1e-3, atol=1e-3)
    assert run_script("documents.py", "136", "143") == documents
    with pytest.raises(AssertionError, match=r"batch_size \(8\) must be divisible by 3"):
        run_script("pretrain.py", ranks=3)


def test_lines_for_nanogpt_continue_from_its_step(readme, one, tmp_path):
    """Each step reads its own samples, whatever was read ahead, or to estimate losses."""
    prefix = mk(one, tmp_path / "p", [np.arange(n) for n in range(1, 60)])
    data_config = config(one, ([prefix], None), split="98,2,0")
    names = vars(one) | {"tokenizer": Tok(), "data_config": data_config, "device": "cpu"}
    names |= {"seed_offset": 1, "max_iters": 20, "tokens_per_iter": 32}  # 4 samples in a step
    names |= {"ddp_world_size": 2, "batch_size": 2, "block_size": 8, "eval_iters": 3}
    for iter_num in (0, 3):
        names["iter_num"] = iter_num
        exec(readme_block(readme, "python", "def get_batch(split)"), names)
        train = names["train"]
        assert (train.num_samples, names["val"].num_samples) == (80, 12)
        for step in range(iter_num, 6):
            wanted = batch_of(train, [4 * step + 2, 4 * step + 3])
            for found, key in zip(names["get_batch"]("train"), ("tokens", "labels"), strict=True):
                same(found, wanted[key])
            with torch.no_grad():
                estimated, _ = names["get_batch"]("train")
            same(estimated, batch_of(train, [4 * (step - iter_num) + k for k in (2, 3)])["tokens"])
