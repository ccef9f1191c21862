#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Megatron-LM's GPT data path in one file: text to files to indices to resumable batches.

For every input on which megatron-core 0.16.1 ("upstream") works as intended, this module yields the
same bytes: the same .bin/.idx files, index arrays, cache files, samples and order of batches.  Read
it from top to bottom: each section needs only those above it, and helpers follow what they serve.
Copied alone into a project it does everything: _helpers.c only makes it faster, and each C kernel
has its definition here, in Python.

Notation    S  tokens in a sample (sequence_length)     D  documents (sequences) in a split
            T  tokens in one epoch of a split           E  epochs over the split
            N  samples in a split                       x  1 if a sample carries one extra token
Contents    1. The file pair                  text becomes two files: tokens, and where each starts
            2. Text to tokens                 JSONL and a tokenizer become a file pair
            3. Split, blend, config           which documents, from which corpora, cut how
            4. Kernels                        the four loops that matter, and the switch to C
            5. GPTDataset and its cache       a file pair becomes samples of S tokens
            6. BlendedDataset                 several datasets become one, by weights
            7. The builder                    a config becomes train, valid and test, on every rank
            8. Samplers, loader, resume       samples become batches, on any number of ranks
            9. Parallel batches               a batch becomes each rank's part of it
            10. Gradients                     the ranks' gradients become one
            11. The command line              megatron-min, and the demo
Examples    read toy_corpus(), the three documents aaaa bbb cccccc, with S = 4
"""

# ruff: noqa: E401
import abc, argparse, array, collections, concurrent.futures, contextlib, dataclasses, datetime
import enum, errno, functools, glob, gzip, hashlib, importlib, inspect, itertools, json, logging
import math, multiprocessing, numbers, operator, os, pathlib, pkgutil, re, secrets, shutil, signal
import struct, sys, tempfile, threading, time, types, warnings, weakref, zlib
import numpy as np
import torch, torch.distributed, torch.utils.data

__version__ = "0.1.0"
log = logging.getLogger("megatron_min")

class DatasetFormatError(ValueError):
    """A file does not hold what its format promises; the message names file, field, wanted, got."""

def _require(condition, sentence, kind=ValueError):
    """Raise kind(sentence) unless condition: for what a user can cause, under python -O too."""
    if not condition:
        raise kind(sentence)

# ==============================================================================
# 1. The file pair
# ==============================================================================
# Question answered here: where on disk are the tokens of sequence i?
#
#   corpus.bin   a a a a b b b c c c c c c      the tokens of all sequences, back to back, one dtype
#                ^       ^     ^
#   corpus.idx   0       4     7 (x item size)  sequence_pointers, in bytes
#                4       3     6                sequence_lengths, in tokens
#                0       1     2     3          document_indices: document d is the sequences
#                                               document_indices[d] .. document_indices[d + 1] - 1
#
# .idx file, all integers little-endian         n sequences, m = documents + 1
#   OFFSET      SIZE   FIELD
#   0           9      magic b"MMIDIDX\0\0"
#   9           8      version, uint64, always 1
#   17          1      dtype code of the .bin file, uint8 (class DType)
#   18          8      n, uint64
#   26          8      m, uint64                <- counts the leading 0 of document_indices
#   34          4n     sequence_lengths, int32
#   34+4n       8n     sequence_pointers, int64
#   34+12n      8m     document_indices, int64
#   34+12n+8m   n      sequence_modes, int8     <- only in multimodal files
#
# corpus.sum, if asked for: CRC-32, uint32 little-endian, of the .idx, then of each MiB of the .bin.
#
# Nothing is half there: files are synced under other names, then renamed, .idx last.  Nothing is
# used after it is gone: an array owns the mapping that it views.  Nothing is believed:
#
#   checked           when                       against
#   header, sizes     every open, O(1)           the table above, and the size of the .bin
#   first, last entry every open, O(1)           documents from 0 to n, the last sequence ends .bin
#   all entries       .idx below 64 MiB,         lengths >= 0, each pointer the sum of the lengths
#                     verify(), add_index()      before it, documents never going back
#   a place           every access               the sequence for the caller, the .bin for the .idx
#   every byte        verify_bin(), verify_reads the .sum

_MAGIC, _HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")
_SUM_BLOCK = 1 << 20  # bytes of a .bin that share a checksum
_CHUNK = 1 << 16  # items handled at a time where an array may be large: they fit a cache
_PART = 1 << 22  # items that are worth a thread of their own
_TRANSIENT = {errno.EINTR, errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
fcntl = importlib.import_module("fcntl") if os.name == "posix" else None
_NO_LOCKS = contextlib.suppress(OSError, AttributeError)  # in this file system, on Windows
_identity = operator.attrgetter("st_ino", "st_size", "st_mtime_ns")  # of a stat: is it the file?

class DType(enum.Enum):
    """The dtype code in an .idx header <-> the numpy dtype of the .bin file.  Upstream: DType.

    >>> DType.code_from_dtype(np.uint16), DType.dtype_from_code(4), DType.size(8)
    (8, <class 'numpy.int32'>, 2)
    """
    uint8, int8, int16, int32, int64, float64, float32, uint16 = range(1, 9)

    @classmethod
    def code_from_dtype(cls, value):
        """numpy dtype -> code; ValueError if the format has no code for it."""
        name, known = np.dtype(value).name, cls.__members__
        _require(name in known, f"no dtype code for {name}: use one of {', '.join(known)}")
        return known[name].value

    @classmethod
    def dtype_from_code(cls, value):
        """code -> numpy type; ValueError if the code is not in the table."""
        _require(value in range(1, 9), f"unknown dtype code {value}: wanted 1 to 8")
        return getattr(np, cls(value).name)

    @staticmethod
    def size(key):
        """Bytes of one token; key is a code or a dtype."""
        return np.dtype(DType.dtype_from_code(key) if isinstance(key, int) else key).itemsize

    @staticmethod
    def optimal_dtype(cardinality):
        """What upstream takes for a vocabulary of this size: uint16 below 65500, else int32."""
        return np.uint16 if cardinality is not None and cardinality < 65500 else np.int32

def get_idx_path(path_prefix):
    """"corpus" -> "corpus.idx"."""
    return f"{os.fspath(path_prefix)}.idx"

def get_bin_path(path_prefix):
    """"corpus" -> "corpus.bin"."""
    return f"{os.fspath(path_prefix)}.bin"

class _NewFile:
    """A file that appears under its name whole, at commit(), or not at all; dropped, it goes."""
    unfinished = weakref.WeakSet()  # what SIGTERM has to remove

    def __init__(self, path):
        self.path, folder, pid = os.fspath(path), os.path.dirname(path) or ".", os.getpid()
        _require(os.path.isdir(folder), f"{folder}: no such folder", FileNotFoundError)
        for old in glob.glob(f"{glob.escape(self.path)}.{'[0-9a-f]' * 16}.tmp"):
            with _NO_LOCKS, open(old, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # if its process was killed
                os.unlink(old)
        self.temporary = ""
        while not os.path.exists(self.temporary):  # or cleaned by another before it was locked
            self.temporary = f"{self.path}.{secrets.token_hex(8)}.tmp"
            self.unfinished.add(self)
            self.file = file = open(self.temporary, "xb", buffering=1 << 20)
            with _NO_LOCKS:
                fcntl.flock(file, fcntl.LOCK_EX)
        os.path.exists(self.path) and shutil.copymode(self.path, self.temporary)  # not more open
        def discard():  # must not refer to self, which would then never be dropped
            file.raw.close()  # without writing the rest, which a full disk refuses
            if os.getpid() == pid:  # in a forked child file and rest are its parent's
                pathlib.Path(file.name).unlink(missing_ok=True)
        self.discard = weakref.finalize(self, discard)

    def commit(self, *others):
        """Sync all, then rename this, over an older one, then others: these vanish in between."""
        for new in (self, *others):
            new.file.flush()
            os.fsync(new.file.fileno())
            fcntl or new.file.close()  # Windows renames no open file
        for old in others:
            pathlib.Path(old.path).unlink(missing_ok=True)
        for new in (self, *others):
            os.replace(new.file.name, new.path)
            new.file.close()

    def __enter__(self):
        return self.file

    def __exit__(self, kind, *_):
        self.discard() if kind else self.commit()

def _as_tokens(tensor, dtype):
    """Tensor, array or list -> 1-D array of dtype; ValueError at the first id that does not fit."""
    dtype = np.dtype(dtype)
    try:  # twice as fast as numpy, and checks ranges too
        if type(tensor) is list and dtype.kind in "iu":
            return np.frombuffer(struct.pack(f"{len(tensor)}{dtype.char}", *tensor), dtype)
    except (struct.error, TypeError):
        pass  # numpy finds out where
    tokens = (tensor.numpy() if type(tensor) is torch.Tensor else np.asarray(tensor)).reshape(-1)
    if tokens.dtype == dtype or dtype.kind not in "iu" or not tokens.size:
        return np.ascontiguousarray(tokens, dtype)
    if tokens.dtype.kind not in "biu":  # no _require(): its sentence costs more than the rest
        raise ValueError(f"{dtype} tokens must be integers, got {tokens.dtype}")
    fit = tokens.astype(dtype)
    if (at := (fit != tokens).tobytes().find(1)) >= 0:  # the first that would wrap
        raise ValueError(f"token {tokens[at]} at {at} does not fit {dtype}: choose a larger dtype")
    return fit

class IndexedDatasetBuilder(contextlib.AbstractContextManager):
    """Write a .bin/.idx pair.  Upstream: IndexedDatasetBuilder; the files are equal byte for byte.

    bin_path     of the tokens, which have a temporary name until finalize()
    dtype        of the stored tokens; an id that does not fit is refused, never wrapped
    multimodal   also store a mode (int8) for each sequence

    A with block ends in finalize(), the .idx beside the .bin, or, on an exception, without files.
    ValueError, before anything is written, on misfits.  Memory: 4 bytes a sequence, 8 a document.

    >>> prefix = os.path.join(tempfile.mkdtemp(), "pair")
    >>> with IndexedDatasetBuilder(get_bin_path(prefix), np.uint16) as builder:
    ...     builder.add_document([97, 97, 98], [2, 1])       # two sequences, one document
    >>> IndexedDataset(prefix)[:], os.path.getsize(get_bin_path(prefix))
    ([array([97, 97], dtype=uint16), array([98], dtype=uint16)], 6)
    """
    def __init__(self, bin_path, dtype=np.int32, multimodal=False):
        self.dtype = DType.dtype_from_code(DType.code_from_dtype(dtype))
        self._bin, self.multimodal = _NewFile(bin_path), multimodal
        self.sequence_lengths, self.sequence_modes = array.array("i"), array.array("b")
        self.document_indices = array.array("q", [0])

    def add_item(self, tensor, mode=0):
        """Append one sequence (integers, any shape, flattened); end_document() closes documents."""
        tokens = _as_tokens(tensor, self.dtype)
        self.add_sequences(tokens, [len(tokens)], [mode] if self.multimodal else None, ())

    def add_document(self, tensor, lengths, modes=None):
        """Append a document: its tokens, and the lengths of its sequences, which must add up."""
        self.add_sequences(tensor, counts := [*lengths], modes, (len(counts),))

    def add_sequences(self, tensor, lengths, modes, ends):
        """Append many sequences at once; a document ends after each ends[i]-th of them."""
        if self._bin.file.closed:
            raise ValueError(f"{self._bin.path} is finalized: nothing can be added")
        tokens, first = _as_tokens(tensor, self.dtype), len(self.sequence_lengths)
        try:
            counts = array.array("i", lengths)
            modes = array.array("b", bytes(len(counts)) if modes is None else modes)
            good = sum(counts) == len(tokens) and len(modes) == len(counts)
        except OverflowError:
            good = False
        if not good or min(counts, default=0) < 0:
            raise ValueError(f"wanted lengths, 0 to {2**31 - 1}, which sum to {len(tokens)} tokens,"
                             f" as many modes, -128 to 127; got {lengths!s:.60}, {modes!s:.60}")
        self._bin.file.write(tokens)
        self.sequence_lengths.extend(counts)
        self.sequence_modes.extend(modes if self.multimodal else ())
        self.document_indices.extend([first + end for end in ends])

    def end_document(self):
        """End the document that the sequences added since the last end belong to."""
        self.document_indices.append(len(self.sequence_lengths))

    def add_index(self, path_prefix):
        """Append a whole pair of the same dtype: its bytes are streamed, its indices shifted."""
        source, target, n = get_bin_path(path_prefix), self._bin.path, len(self.sequence_lengths)
        _require(os.path.realpath(source) != os.path.realpath(target),
                 f"{source} is both input and output: choose another output prefix")
        other = IndexedDataset(path_prefix, multimodal=self.multimodal, check=True)
        _require(other.dtype == self.dtype, f"{source} holds {other.dtype.__name__} tokens, wanted "
                 f"{self.dtype.__name__} as in {target}")
        with open(source, "rb") as file:
            shutil.copyfileobj(file, self._bin.file, 16 << 20)
        self.sequence_lengths.frombytes(other.sequence_lengths.tobytes())
        self.document_indices.frombytes((other.document_indices[1:] + n).tobytes())
        self.sequence_modes.frombytes(other.sequence_modes.tobytes() if self.multimodal else b"")

    def finalize(self, idx_path):
        """Write .idx, name both files; ValueError if sequences follow the last end_document()."""
        _require(not self._bin.file.closed, f"{self._bin.path} is finalized: nothing can be added")
        _require(len(self.sequence_lengths) == self.document_indices[-1], f"{self._bin.path}: no "
                 f"document ends after sequence {self.document_indices[-1]}: call end_document()")
        lengths = np.frombuffer(self.sequence_lengths, np.int32)
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * DType.size(self.dtype)
        index, code = _NewFile(idx_path), DType.code_from_dtype(self.dtype)
        index.file.write(_HEADER.pack(_MAGIC, 1, code, len(lengths), len(self.document_indices)))
        index.file.writelines((lengths, pointers, self.document_indices, self.sequence_modes))
        pathlib.Path(idx_path).with_suffix(".sum").unlink(missing_ok=True)  # of an older pair
        self._bin.commit(index)

    def __exit__(self, kind, *_):
        try:
            if kind is None and not self._bin.file.closed:
                self.finalize(get_idx_path(self._bin.path.removesuffix(".bin")))
        finally:
            self._bin.discard()  # which finds nothing of a finalized file

def _want(condition, path, field, wanted, got):
    """DatasetFormatError with the four things its message always names."""
    _require(condition, f"{path}: {field}: wanted {wanted}, got {got}", DatasetFormatError)

def _map_file(path):
    """A file as a read-only uint8 array that owns its mapping, which an empty file cannot have."""
    return np.asarray(np.memmap(path, "u1", "r")) if os.path.getsize(path) else np.empty(0, "u1")

def _position(idx, n, of):
    """A Python index, negative ones from the end -> 0 .. n - 1; IndexError outside."""
    if not -n <= (i := operator.index(idx)) < n:
        raise IndexError(f"index {i} of {of}, which has {n}")
    return i % n

def _retry(function):
    """function(), again after a transient OSError; any other passes at once."""
    for delay in (0.5, 1.0, 2.0, None):
        try:
            return function()
        except OSError as error:
            if error.errno not in _TRANSIENT or delay is None:
                raise
            time.sleep(delay)

class IndexedDataset(torch.utils.data.Dataset):
    """Read a .bin/.idx pair.  Upstream: IndexedDataset.

    path_prefix   the pair's path without .bin and .idx
    multimodal    return (tokens, mode); the file must hold modes
    mmap          True: views of the mapped file.  False: each access opens and reads the file.
    check         check the whole .idx (verify(), as builders of indices do); None: if below 64 MiB
    verify_reads  compare each MiB of .bin, when first read, with the .sum of write_checksums()

    ds[i] is sequence i as a 1-D array of ds.dtype, ds[a:b] a list of them.  Opening costs O(1), or
    O(n) with the check.  DatasetFormatError (a ValueError) where a file is not what it says,
    IndexError for a place outside of it.

    >>> ds = IndexedDataset(toy_corpus())
    >>> len(ds), ds.sequence_lengths.tolist(), ds.sequence_pointers.tolist()
    (3, [4, 3, 6], [0, 4, 7])
    >>> ds.document_indices.tolist(), bytes(ds.get(2, offset=1, length=2))
    ([0, 1, 2, 3], b'cc')
    """
    def __init__(self, path_prefix, multimodal=False, mmap=True, object_storage_config=None,
                 check=None, verify_reads=False):
        self.verify_reads = verify_reads
        self.path_prefix, self.multimodal, self.mmap = os.fspath(path_prefix), multimodal, mmap
        self.check, self.object_storage_config, self._checked = check, object_storage_config, False
        path, self._bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
        self._stat, self._index = os.stat(path), (index := _map_file(path))
        *kind, code, n, m = _HEADER.unpack(index[:34].tobytes().ljust(34, b"\0"))
        _want(kind == [_MAGIC, 1], path, "magic, version", [_MAGIC, 1], kind)
        _want(1 <= code <= 8, path, "dtype code", "1 to 8", code)
        self.dtype, self._item = DType.dtype_from_code(code), DType.size(code)
        plain, full = 34 + 12 * n + 8 * m, 34 + 13 * n + 8 * m
        _want(len(index) == full or (len(index) == plain and not multimodal), path, "file size",
              f"{full} bytes with modes" + (not multimodal) * f" or {plain} without", len(index))
        at = functools.partial(np.frombuffer, index)  # (dtype, count, offset) of the table above
        self.sequence_lengths = at(np.int32, n, 34)  # in tokens
        self.sequence_pointers = at(np.int64, n, 34 + 4 * n)  # in bytes
        self.document_indices = at(np.int64, m, 34 + 12 * n)  # in sequences
        self.sequence_modes = at(np.int8, n, plain) if multimodal else None
        ends = self.document_indices[[0, -1]].tolist() if m else []
        _want(ends == [0, n], path, "document_indices", f"from 0 to {n}", ends)
        end = n and int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self._item
        stat = _retry(lambda: os.stat(self._bin_path))
        _want(end == stat.st_size, self._bin_path, f"file size ({self.dtype.__name__} tokens)",
              f"{end} bytes, as {path} says", f"{stat.st_size}: truncated, or of another pair")
        self.num_tokens, self._size, self._bin_identity = end // self._item, end, _identity(stat)
        if check or (check is None and len(index) < 64 << 20):  # more is slow to read on every rank
            self.verify()
        self._tokens = _map_file(self._bin_path).view(self.dtype) if mmap else None
        _want(_identity(os.stat(path)) == _identity(self._stat), path, "file", "kept", "rewritten")
        if verify_reads:
            self.verify_bin(0, 0)

    def verify(self):
        """The O(n) part, done once: no negative length, pointers their sum, documents in order."""
        path, start = get_idx_path(self.path_prefix), 0
        if self._checked:
            return
        for low in range(0, len(self), _CHUNK):
            chunk = slice(low, low + _CHUNK)
            lengths, found = self.sequence_lengths[chunk], self.sequence_pointers[chunk]
            ends = start + np.cumsum(lengths, dtype=np.int64) * self._item
            due = ends - lengths * np.int64(self._item)
            at = int(np.argmax((lengths < 0) | (found != due)))
            _want(lengths[at] >= 0, path, f"sequence_lengths[{low + at}]", ">= 0", lengths[at])
            _want(found[at] == due[at], path, f"sequence_pointers[{low + at}]", due[at], found[at])
            start = ends[-1]
        for low in range(0, len(self.document_indices) - 1, _CHUNK):
            found = self.document_indices[low:low + _CHUNK + 1]
            at = int(np.argmax(found[1:] < found[:-1]))
            _want(found[at] <= found[at + 1], path, f"document_indices[{low + at + 1}]",
                  f">= {found[at]}", found[at + 1])
        self._checked = True

    def __len__(self):
        return len(self.sequence_lengths)

    def __getitem__(self, idx):
        if not isinstance(idx, slice):
            return self.get(idx)
        _require(idx.step in (None, 1), f"slices of a dataset are contiguous, got step {idx.step}")
        found = [self.get(i) for i in range(len(self))[idx]]
        return ([item[0] for item in found], self.sequence_modes[idx]) if self.multimodal else found

    def get(self, idx, offset=0, length=None):
        """Tokens offset .. offset + length of sequence idx (default: to its end), 1-D, ds.dtype."""
        i, path = _position(idx, len(self), self.path_prefix), self.path_prefix
        pointer, size = int(self.sequence_pointers[i]), int(self.sequence_lengths[i])
        first, odd = divmod(pointer, self._item)
        if odd or first < 0 or size < 0 or first + size > self.num_tokens:  # an .idx not checked
            _want(False, path, f"sequence {i}", "a place in .bin", f"byte {pointer}, {size} tokens")
        offset, length = int(offset), size - int(offset) if length is None else int(length)
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"{path}[{i}] has {size} tokens, wanted {offset} to {offset + length}")
        first, last, item = first + offset, first + offset + length, self._item
        if self.verify_reads and length:
            self.verify_bin(first * item, last * item)
        tokens = (self._bytes(first * item, last * item).view(self.dtype) if self._tokens is None
                  else self._tokens[first:last])
        return (tokens, self.sequence_modes[i]) if self.multimodal else tokens

    def _bytes(self, start, end):
        """Bytes start .. end - 1 of the .bin, uint8: a view of the mapped file, or read anew."""
        if self._tokens is not None:
            return self._tokens.view(np.uint8)[start:end]
        def read():
            data, done = np.empty(min(end, self._size) - start, np.uint8), 0
            with open(self._bin_path, "rb", buffering=0) as file:
                now, old = _identity(os.fstat(file.fileno())), self._bin_identity
                _want(now == old, self._bin_path, "inode, size, time", old, f"{now}: rewritten")
                while got := os.pread(file.fileno(), len(data) - done, start + done):
                    data[done:done + len(got)] = np.frombuffer(got, np.uint8)
                    done += len(got)
            _want(done == len(data), self._bin_path, f"bytes at {start}", len(data), done)
            return data
        return _retry(read)

    @functools.cached_property
    def _sums(self):
        """CRC-32 of each MiB, as the .sum has it, or -1 once it was right; the .idx is right."""
        path, blocks = f"{self.path_prefix}.sum", -(-self._size // _SUM_BLOCK)
        sums, found = np.fromfile(path, "<u4").astype(np.int64), zlib.crc32(self._index)
        _want(len(sums) == blocks + 1, path, "CRCs", blocks + 1, len(sums))
        _want(found == sums[0], get_idx_path(self.path_prefix), "CRC-32", sums[0], found)
        return sums[1:]

    def verify_bin(self, start=0, end=None):
        """Compare each MiB that holds one of the bytes start .. end - 1 of the .bin with the .sum,
        once; DatasetFormatError names the bytes and the documents that are damaged."""
        sums, end = self._sums, self._size if end is None else end
        for block in range(start // _SUM_BLOCK, -(-end // _SUM_BLOCK)):
            low, high = block * _SUM_BLOCK, (block + 1) * _SUM_BLOCK
            if (due := sums[block]) >= 0 and due != (found := zlib.crc32(self._bytes(low, high))):
                some = np.searchsorted(self.sequence_pointers, [low, high - 1], "right") - 1
                some = np.searchsorted(self.document_indices, some, "right") - 1
                _want(False, self._bin_path, f"CRC-32 of bytes {low} to {min(high, self._size)}, "
                      f"of documents {some[0]} to {some[1]}", f"{due} (its .sum)", found)
            sums[block] = -1

    def __reduce__(self):  # pickled as its path: a worker process opens the files again
        return type(self), (self.path_prefix, self.multimodal, self.mmap,
                            self.object_storage_config, self.check, self.verify_reads)

    @staticmethod
    def exists(path_prefix):
        """True if both files of the pair are there."""
        return all(map(os.path.exists, (get_idx_path(path_prefix), get_bin_path(path_prefix))))

def merge(prefixes, output_prefix, multimodal=False):
    """Append whole pairs, in the given order, into one new pair of the same dtype, as if one
    builder had written all; not into an input.  Cost: streamed.  Upstream: tools/merge_datasets.py.

    >>> prefix = toy_corpus()
    >>> merge([prefix, prefix], prefix + "2")
    >>> IndexedDataset(prefix + "2").document_indices.tolist()
    [0, 1, 2, 3, 4, 5, 6]
    """
    prefixes = [prefixes] if isinstance(prefixes, (str, os.PathLike)) else list(prefixes)
    _require(prefixes, "merge wants at least one input prefix")
    dtype = IndexedDataset(prefixes[0], check=False).dtype
    with IndexedDatasetBuilder(get_bin_path(output_prefix), dtype, multimodal) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)

def write_checksums(path_prefix):
    """Write <path_prefix>.sum: the CRC-32 of the .idx and of each MiB of the .bin, by which
    verify_bin() and verify_reads find what a disk or a copy has changed.  Not upstream's.

    >>> write_checksums(prefix := toy_corpus())
    >>> IndexedDataset(prefix).verify_bin()
    """
    ds = IndexedDataset(path_prefix, check=True)
    sums = [zlib.crc32(ds._bytes(at, at + _SUM_BLOCK)) for at in range(0, ds._size, _SUM_BLOCK)]
    with _NewFile(f"{path_prefix}.sum") as file:
        file.write(np.array([zlib.crc32(ds._index), *sums], "<u4"))

def toy_corpus(folder=None):
    """Write the documents of every example, aaaa bbb cccccc, in ASCII -> their path prefix."""
    prefix = os.path.join(folder or tempfile.mkdtemp(), "toy")
    with IndexedDatasetBuilder(get_bin_path(prefix), np.uint8) as builder:
        builder.add_sequences(list(b"aaaabbbcccccc"), [4, 3, 6], None, [1, 2, 3])
    return prefix

# ==============================================================================
# 2. Text to tokens
# ==============================================================================
# Question answered here: how does a JSONL file become a file pair, fast, in its own order?
#
#   this process reads  ->  blocks of lines  ->  N workers: JSON, tokenizer  ->  this process writes
#
# Blocks are written in the order in which they were read.  An empty text is a document without
# tokens: it adds no sequence and no eod, only a repeated entry in document_indices (as upstream).

_BLOCK = 1 << 20  # bytes of text handed to a worker at a time

class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, eod 256: no files, no loss, about 4 tokens for a trained one.

    >>> ByteTokenizer().tokenize("aaaa"), ByteTokenizer().detokenize([98, 256])
    ([97, 97, 97, 97], 'b')
    """
    vocab_size, eod = 257, 256
    unique_identifiers = {"class": "ByteTokenizer"}

    def tokenize(self, text):
        """str -> list of ids."""
        return list(text.encode())

    def detokenize(self, ids):
        """ids -> str; eods are left out, broken UTF-8 becomes the replacement character."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

class NullTokenizer:
    """Numbers separated by spaces; eod is the number after the last.  Upstream: NullTokenizer.

    >>> NullTokenizer(100).tokenize("7 0 99"), NullTokenizer(100).eod
    ([7, 0, 99], 100)
    """
    def __init__(self, vocab_size):
        _require(str(vocab_size).isdecimal(), f"null:VOCAB wants a number, got {vocab_size!r}")
        self.eod, self.vocab_size = int(vocab_size), int(vocab_size) + 1
        self.unique_identifiers = {"class": "NullTokenizer", "vocab_size": self.vocab_size}

    def tokenize(self, text):
        """str -> list of ids."""
        return [int(number) for number in text.split()]

    def detokenize(self, ids):
        """ids -> str."""
        return " ".join(map(str, ids))

class HuggingFaceTokenizer:
    """A tokenizer.json, run by the tokenizers library (extra "tools"); eod_token is the text of the
    end-of-document token, by default <|endoftext|>, else </s>."""
    def __init__(self, path, eod_token=None):
        _require(os.path.isfile(path), f"{path}: no such file", FileNotFoundError)
        _require(importlib.util.find_spec("tokenizers"), f"{path} needs the package tokenizers: "
                 "pip install 'megatron-min[tools]'", ImportError)
        self._tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(path)
        self.vocab_size = self._tokenizer.get_vocab_size()
        wanted = [eod_token] if eod_token else ["<|endoftext|>", "</s>"]
        found = [i for i in map(self._tokenizer.token_to_id, wanted) if i is not None]
        _require(found, f"{path}: no token {' or '.join(wanted)}: name another with --eod-token")
        self.eod, digest = found[0], _md5(self._tokenizer.to_str())
        self.unique_identifiers = {
            "class": "HuggingFaceTokenizer", "tokenizer.json": digest, "eod": self.eod}

    def tokenize(self, text):
        """str -> list of ids."""
        return self._tokenizer.encode(text).ids

    def tokenize_batch(self, texts):
        """list of str -> list of lists of ids, in parallel inside the library."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]

    def detokenize(self, ids):
        """ids -> str."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

def _md5(data):
    """Hex digest of bytes or str: names things, protects nothing."""
    data = data.encode() if isinstance(data, str) else data
    return hashlib.md5(data, usedforsecurity=False).hexdigest()

def build_tokenizer(name="bytes", eod_token=None):
    """"bytes", "null:VOCAB", a tokenizer.json, or module:attribute (an object or its class)."""
    if name == "bytes":
        return ByteTokenizer()
    if name.startswith("null:"):
        return NullTokenizer(name[5:])
    if name.endswith(".json"):
        return HuggingFaceTokenizer(name, eod_token)
    _require(":" in name, f"unknown tokenizer {name!r}: use bytes, null:VOCAB, *.json, module:name")
    with contextlib.ExitStack() as stack:
        sys.path.insert(0, os.getcwd())  # as python -m does: the module may lie beside the data
        stack.callback(sys.path.pop, 0)
        found = pkgutil.resolve_name(name)
    is_one = hasattr(found, "tokenize") and not isinstance(found, type)
    _require(is_one or callable(found), f"{name} is no tokenizer, and makes none")
    return found if is_one else found()

class _Encoder:
    """A worker's job: a block of JSON lines -> tokens, sequence lengths, document ends, by key.

    lines                          tokens                 lengths   ends
    {"text": "aaaa"}               a a a a $ b b b $      5 4       1  the first ends after one
    {"text": ""}       -- eod -->  (here $ is eod)                  1  sequence, so does the empty
    {"text": "bbb"}                                                 2  one
    """
    def __init__(self, tokenizer, json_keys, append_eod, skip_errors):
        self.keys, self.skip_errors = json_keys, skip_errors
        self.tokenize = (getattr(tokenizer, "tokenize_batch", None)
                         or functools.partial(map, tokenizer.tokenize))
        self.dtype = DType.optimal_dtype(tokenizer.vocab_size)
        self.eod = _as_tokens([tokenizer.eod] if append_eod else [], self.dtype)

    def __call__(self, source, first, lines):
        """-> (tokens, sequence lengths, document ends) of each key, documents, skipped lines"""
        rows, columns = self._rows(source, first, lines), []
        for documents in zip(*rows):
            ends = list(itertools.accumulate(len(tokens) > 0 for tokens in documents))
            pieces = [(tokens, self.eod) for tokens in documents if len(tokens)]
            flat = np.concatenate([self.eod[:0], *itertools.chain(*pieces)])
            columns.append((flat, [len(tokens) + len(self.eod) for tokens, _ in pieces], ends))
        return columns, len(rows), len(lines) - len(rows)

    def _rows(self, source, first, lines):
        """Lines -> for each the tokens under each key; a bad one is named, or left out."""
        try:
            rows = [json.loads(line) if line.strip() else None for line in lines]
            texts = [[isinstance(row, dict) and row.get(key) for row in rows] for key in self.keys]
            if not all(isinstance(text, str) for text in itertools.chain(*texts)):
                raise ValueError(f"wanted JSON with text under {self.keys}, got {lines[0][:60]!r}")
            return list(zip(*([_as_tokens(ids, self.dtype) for ids in self.tokenize(column)]
                              for column in texts)))
        except Exception as error:
            if len(lines) == 1 and not self.skip_errors:
                raise ValueError(f"{source}: line {first}: {error} (or --on-error skip)") from None
            again = enumerate(lines, first) if len(lines) > 1 else ()  # to find the bad one
            return [row for number, line in again for row in self._rows(source, number, [line])]

def _start_worker(encoder):
    """What a worker process runs first; it then keeps its tokenizer."""
    parent = multiprocessing.parent_process()  # an orphan would wait for ever
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C the parent ends it
    _work.encoder, os.environ["TOKENIZERS_PARALLELISM"] = encoder, "false"  # processes are enough

def _work(block):
    """What a worker process runs for each block."""
    return _work.encoder(*block)

def _in_order(workers, encoder, blocks):
    """itertools.starmap(encoder, blocks), but in worker processes."""
    # "fork" where there is one: the others would import torch again in each worker
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else None)
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, [encoder])
    return _ahead(pool, 2 * workers, _work, blocks)

def _ahead(pool, limit, function, items):
    """map(function, items) in a pool, few ahead: memory stays flat however many there are."""
    futures = (pool.submit(function, item) for item in items)  # each when it is asked for
    pending = collections.deque(itertools.islice(futures, limit))
    try:
        while pending:
            pending.extend(itertools.islice(futures, 1))
            yield pending.popleft().result()
    finally:  # no join: a garbage collection may close this, even in a thread that is starting
        pool.shutdown(wait=False, cancel_futures=True)

def _blocks(files, read):
    """Yield (file, number of its first line, lines); read[n]: bytes of file n, as they are."""
    for n, path in enumerate(files):
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as raw:
            text, number = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw, 1
            while lines := text.readlines(_BLOCK):
                read[n] = read[n] + sum(map(len, lines)) if text is raw else raw.tell()
                yield path, number, lines
                number += len(lines)

def _report(done, read, total, start, every):
    """A line about progress on stderr, unless the last one is not so many seconds old."""
    seconds = time.perf_counter() - start
    if seconds - done["reported"] >= every:
        done["reported"] = seconds
        left = max(total / max(read.total(), 1) - 1, 0) * seconds
        print(f"{done['documents']:,} documents, {done['documents'] / seconds:,.0f} docs/s, "
              f"{read.total() / seconds / 1e6:,.1f} MB/s, {done['skipped']:,} bad lines skipped, "
              f"ETA {datetime.timedelta(seconds=round(left))}", file=sys.stderr, flush=True)

def preprocess(input: list[str] | str, output_prefix, tokenizer=None, *, append_eod=False,
               json_keys: list[str] | str = ("text",), workers=1, on_error="stop", verbose=False,
               checksum=False):
    """JSONL -> <output_prefix>_<key>_document.bin/.idx.  Upstream: tools/preprocess_data.py.

    input        files and globs of .jsonl or .jsonl.gz ("-" is stdin), read in this order
    tokenizer    an object as described in section 3; default ByteTokenizer()
    append_eod   put tokenizer.eod after each document that has tokens
    workers      processes; the files are the same for any number
    on_error     "stop": ValueError with file, line and reason; "skip": count bad lines, go on
    verbose      progress on stderr: docs/s, MB/s and the time left
    checksum     then also write_checksums() of the pairs
    Returns      {key: path prefix of its pair}; nothing appears before all of it is complete

    >>> path = pathlib.Path(tempfile.mkdtemp(), "toy.jsonl")
    >>> _ = path.write_text('{"text": "aaaa"}\\n{"text": "bbb"}')
    >>> IndexedDataset(preprocess(path, path.with_suffix(""), append_eod=True)["text"])[:]
    [array([ 97,  97,  97,  97, 256], dtype=uint16), array([ 98,  98,  98, 256], dtype=uint16)]
    """
    _require(on_error in ("stop", "skip"), f"on_error must be stop or skip, got {on_error!r}")
    _require(workers >= 1, f"workers must be >= 1, got {workers}")
    _require(input and json_keys, "preprocess wants at least one input and one key")
    keys = [json_keys] if isinstance(json_keys, str) else json_keys
    files = []  # a name that exists is no pattern
    for path in map(os.fspath, [input] if isinstance(input, (str, os.PathLike)) else input):
        files += os.path.exists(path) * [path] or sorted(glob.glob(path, recursive=True)) or [path]
    prefixes = {key: f"{os.fspath(output_prefix)}_{key}_document" for key in keys}
    encoder = _Encoder(tokenizer or ByteTokenizer(), [*prefixes], append_eod, on_error == "skip")
    total = sum(os.path.getsize(path) for path in files if path != "-")
    done, read, start = collections.Counter(), collections.Counter(), time.perf_counter()
    starmap = itertools.starmap if workers == 1 else functools.partial(_in_order, workers)
    with contextlib.ExitStack() as stack:
        builders = [stack.enter_context(IndexedDatasetBuilder(get_bin_path(prefix), encoder.dtype))
                    for prefix in prefixes.values()]
        for columns, documents, skipped in starmap(encoder, _blocks(files, read)):
            for builder, (tokens, lengths, ends) in zip(builders, columns):
                builder.add_sequences(tokens, lengths, None, ends)
            done.update(documents=documents, skipped=skipped)
    _report(done, read, total, start, 0 if verbose else math.inf)
    for prefix in prefixes.values() if checksum else ():
        write_checksums(prefix)
    return prefixes

# ==============================================================================
# 3. Split, blend, config
# ==============================================================================
# Question answered here: which documents of which corpora, and cut how?
#
#   split "98,1,1" of a corpus of 1000 sequences      |<------- train 0..979 ------->|valid|test|
#   blend (["p1", "p2"], [30, 70])                    of 10 samples 3 come from p1 and 7 from p2
#
# A tokenizer is any object with vocab_size, eod, perhaps pad, tokenize(text) -> ids,
# detokenize(ids) -> text, and unique_identifiers, a dict that enters the cache's key.

class Split(enum.Enum):
    """The three parts of a corpus: train is 0, valid 1, test 2.  Upstream: Split."""
    train, valid, test = range(3)

def normalize(weights):
    """w / sum(w) in float64, as a list.

    >>> normalize([30, 70])
    [0.3, 0.7]
    """
    return np.divide(weights, np.sum(weights, dtype=np.float64)).tolist()

def _check_weights(weights, names):
    """ValueError that names the dataset whose weight is no weight."""
    _require(len(weights) == len(names), f"{len(weights)} weights for {len(names)} datasets")
    for weight, name in zip(weights, names):
        _require(isinstance(weight, numbers.Real) and 0 <= weight <= sys.float_info.max,
                 f"weight of {name}: wanted a finite number >= 0, got {weight!r}")
    _require(0 < sum(map(float, weights)) < math.inf, f"weights {weights}: wanted a finite sum > 0")

def parse_and_normalize_split(split):
    """Shares of train, valid, test -> normalized, missing ones 0.  ValueError for anything but up
    to three numbers >= 0, not all 0 (upstream drops signs, exponents and empty fields).

    >>> parse_and_normalize_split("3,1")
    [0.75, 0.25, 0.0]
    """
    parts = [_number(text) for text in re.split(r"\s*[,;/]\s*|\s+", str(split).strip("[]() "))]
    good = None not in parts and len(parts) <= 3 and min(parts) >= 0 and 0 < sum(parts) < math.inf
    _require(good, f'split {split!r}: wanted up to 3 numbers >= 0, not all 0, such as "98,1,1"')
    return normalize(parts + [0.0] * (len(Split) - len(parts)))

def _number(text):
    """What float() reads in it, or None."""
    with contextlib.suppress(ValueError):
        return float(text)

def convert_split_vector_to_split_matrix(vector_a, vector_b=None):
    """Shares -> (begin, end) of each split as fractions, None where empty.  With two vectors, the
    part of each split of b that lies in the same split of a.

    >>> convert_split_vector_to_split_matrix([0.75, 0.25, 0.0])
    [(0, 0.75), (0.75, 1.0), None]
    """
    a = [*itertools.accumulate(vector_a, initial=0)]
    b = a if vector_b is None else [*itertools.accumulate(vector_b, initial=0)]
    overlaps = zip(map(max, a, b), map(min, a[1:], b[1:]))
    return [(low, high) if low < high else None for low, high in overlaps]

def split_range(bounds, num_sequences):
    """(begin, end) fractions of a corpus -> (first, end) sequence; Python's round, as upstream.

    >>> split_range((0, 0.75), 3), split_range((0.75, 1.0), 3)
    ((0, 2), (2, 3))
    """
    return tuple(int(round(bound * float(num_sequences))) for bound in bounds)

def get_blend_from_list(blend):
    """["30", "p1", "70", "p2"] or ["p1", "p2"] -> (prefixes, weights or None); None -> None.
    ValueError for a list that is neither (upstream guesses); a folder named 2023 is ./2023.

    >>> get_blend_from_list(["30", "p1", "70", "p2"])
    (['p1', 'p2'], [30.0, 70.0])
    """
    if blend is None:
        return None
    blend = [str(entry).strip() for entry in blend]
    numeric = [_number(entry) is not None for entry in blend]
    if blend and not any(numeric):
        return blend, None
    _require(blend and numeric == [True, False] * (len(blend) // 2),
             f"blend {blend}: wanted prefixes, or weights and prefixes in turn (2023 is ./2023)")
    return blend[1::2], [float(weight) for weight in blend[0::2]]

@dataclasses.dataclass
class BlendedMegatronDatasetConfig:
    """What to build.  Field names and defaults are upstream's; ValueError for bad combinations.

    random_seed                 of every shuffle of documents and samples
    sequence_length             S, in tokens
    blend                       ([prefix, ...], [weight, ...] or None), each corpus cut by split
    blend_per_split             for each split such a blend of whole corpora, or None; neither: mock
    multiple_validation_sets    valid is a list of datasets, one for each of its corpora
    full_validation             valid is one epoch of each: its size must be None
    split                       shares of train, valid, test, such as "98,1,1"
    num_dataset_builder_threads corpora that are built side by side
    path_to_cache               folder of index files; None: beside each corpus, of blends none
    mmap_bin_files              False: read the tokens with os.pread
    mid_level_dataset_surplus   how much more of each corpus is built than a blend asks for
    allow_ambiguous_pad_tokens  pad with the tokenizer's pad id even where it is also its eod
    fast_cache_load             trust a cache that is there; look at nothing else
    defer_npy_index_mmap        open the index files at the first access
    verify_reads                compare each MiB with the corpus's .sum when it is first read
    """
    random_seed: int
    sequence_length: int
    blend: tuple | None = None
    blend_per_split: list | None = None
    multiple_validation_sets: bool | None = None
    full_validation: bool | None = None
    split: str | None = None
    split_matrix: list | None = dataclasses.field(init=False, default=None)
    num_dataset_builder_threads: int = 1
    path_to_cache: str | None = None
    mmap_bin_files: bool = True
    mock: bool = dataclasses.field(init=False, default=False)
    tokenizer: object | None = None
    mid_level_dataset_surplus: float = 0.005
    allow_ambiguous_pad_tokens: bool | None = False
    fast_cache_load: bool = False
    defer_npy_index_mmap: bool = False
    verify_reads: bool = dataclasses.field(default=False, kw_only=True)  # not upstream's

    def __post_init__(self):
        for name in ("sequence_length", "random_seed", "num_dataset_builder_threads"):
            value, low = getattr(self, name), 0 if name == "random_seed" else 1
            _require(hasattr(value, "__index__") and low <= value < 2**32,
                     f"{name} must be a whole number from {low} to 2**32 - 1, got {value!r}")
            setattr(self, name, int(value))  # numpy's are no JSON
        surplus, per_split = self.mid_level_dataset_surplus, self.blend_per_split or ()
        _require(surplus >= 0, f"mid_level_dataset_surplus must be >= 0, got {surplus}")
        if any(per_split):
            whole = self.blend is None and self.split is None and len(per_split) == len(Split)
            _require(whole, f"blend_per_split wants {len(Split)} entries, got {len(per_split)}; "
                     f"blend and split None, got {self.blend} and {self.split}")
        else:
            self.mock = self.blend is None
            self.split = "1,1,1" if self.mock else self.split
            _require(self.split is not None and not self.multiple_validation_sets, "a blend needs "
                     'a split, such as "98,1,1", and multiple_validation_sets blend_per_split')
            self.split_matrix = convert_split_vector_to_split_matrix(
                parse_and_normalize_split(self.split))
        for blend in filter(None, [self.blend, *per_split]):
            _require(len(blend) == 2 and not isinstance(blend[0], str) and len(blend[0])
                     and all(isinstance(prefix, (str, os.PathLike)) for prefix in blend[0]),
                     f"a blend is ([prefix, ...], [weight, ...] or None), got {blend!r}")
            _check_weights([1] * len(blend[0]) if blend[1] is None else blend[1], blend[0])

@dataclasses.dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """The config of GPTDataset; on top of the base class:

    reset_position_ids       positions restart after every eod token
    reset_attention_mask     no attention across an eod token
    eod_mask_loss            no loss where the input token is eod
    create_attention_mask    return the dense (1, S, S) mask
    drop_last_partial_validation_sequence   False: the last, short sample of valid is kept, padded
    add_extra_token_to_sequence             x = 1: labels are the next tokens, to the last one
    inter_document_masking   instead of a mask: cu_seqlens, max_seqlen, positions by document

    >>> GPTDatasetConfig(1234, 4, blend=(["p1", "p2"], [1, -1]), split="98,1,1")
    Traceback (most recent call last):
    ValueError: weight of p2: wanted a finite number >= 0, got -1
    """
    reset_position_ids: bool | None = None
    reset_attention_mask: bool | None = None
    eod_mask_loss: bool | None = None
    create_attention_mask: bool = True
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    object_storage_cache_path: str | None = None
    inter_document_masking: bool = False

    def __post_init__(self):
        super().__post_init__()
        _require(self.tokenizer is not None, "a GPTDatasetConfig needs a tokenizer, for its eod")
        dense = self.create_attention_mask and not self.inter_document_masking
        _require(dense or not self.reset_attention_mask, "reset_attention_mask has no effect "
                 "without a dense mask: set create_attention_mask, or inter_document_masking alone")

# ==============================================================================
# 4. Kernels
# ==============================================================================
# Question answered here: in which order do documents and samples come, and where does each start?
#
#   position  0 1 2 3 4 5 6 7 8 9 ...      sample 0 = a a a a b    inputs a a a a   labels a a a b
#   stream    a a a a b b b c c c c c c    sample 1 = b b b c c    row 1 -> (document 1, offset 0)
#
# Each _py_ function is the definition of its kernel; the C function of the same name is equal and
# faster, and is swapped in below.  The public functions check, allocate and call one or the other.

def _py_build_sample_idx(rows, sizes, document_index, sequence_length, extra, last_token,
                         first_row=0, first_document=0, before=0):
    """Fill rows, a part of sample_index that begins at first_row, and whose last row has the target
    last_token; extra is x; before tokens precede this part of document_index, which begins at
    first_document -> the tokens up to its end.  Whatever is wrong first in it is said."""
    wrong = np.flatnonzero((document_index < 0) | (document_index >= len(sizes)))[:1]
    lengths = sizes[document_index[:min(wrong, default=None)]]
    _require((lengths >= 0).all(), "a size is negative: no sequence has less than 0 tokens")
    for d, i in zip(wrong, document_index[wrong]):
        raise IndexError(f"document_index[{first_document + d}] is {i} of {len(sizes)} sequences")
    ends = before + np.cumsum(lengths, dtype=np.int64)
    found = int(ends[-1]) if len(ends) else before
    if first_row == 0:
        rows[:1], rows, first_row = 0, rows[1:], 1
    if len(rows):
        _require(found >= last_token, f"the samples need {last_token} tokens, there are {found}")
        targets = (first_row + np.arange(len(rows))) * sequence_length + extra
        targets[-1] = last_token
        at = np.searchsorted(ends, targets)  # the first document whose end reaches the target
        rows[:, 0] = first_document + at
        rows[:, 1] = targets - extra - (ends[at] - lengths[at])
    return found

def _py_shuffle(items, key, position):
    """items are shuffled; key, uint32 (624,), and the result are the generator's new state."""
    random_state = np.random.RandomState()
    random_state.set_state(("MT19937", key, position))
    random_state.shuffle(items)
    _, key[:], position, *_ = random_state.get_state()
    return position

def _py_build_blending_indices(dataset_index, dataset_sample_index, weights, num_datasets,
                               size=None):
    """Fill int16 and int64 (size,); weights float64 (num_datasets,).  Without a size, exhaustive:
    weights are int64, and dataset d gives weights[d] samples."""
    taken, most = np.zeros(int(num_datasets)), np.inf
    if size is None:
        most, size = weights, weights.sum()
        weights = most / np.float64(max(size, 1))
    for i in range(size):
        d = np.argmax(np.where(taken < most, weights * max(i, 1) - taken, -np.inf))  # the lowest
        dataset_index[i], dataset_sample_index[i] = d, taken[d]
        taken[d] += 1

_py_build_exhaustive_blending_indices = _py_build_blending_indices  # called without a size

def _py_read_samples(outputs, places, wanted, corpus, indices, settings):
    """Write sample wanted[r] into row places[r] of the outputs, arrays (B, ...) or None.

    text            a $ b b $ c          S = 5, x = 1, $ is eod; a pad id becomes 0, without loss
    tokens, labels  a $ b b $, $ b b $ c
    position_ids    0 1 2 3 4            by_eod, or by documents if cu_seqlens is there: 0 1 0 1 2
    cu_seqlens      0 2 5 5 5 5          where documents begin, from 0 to S without a pause, then S;
                                         the last has the padding, none has the extra token
    max_seqlen      3                    the longest of them
    attention_mask  0 1 1 1 1            1: may not attend, to the future
                    0 0 1 1 1
                    1 1 0 1 1            and, with reset_mask, to what lies before an eod
                    1 1 0 0 1
                    1 1 0 0 0

    corpus          items, the tokens of a .bin file; pointers and lengths, as in its .idx
    indices         document_index, sample_index, shuffle_index
    settings        extra (x), pad and eod (ids), by_eod, mask_loss and reset_mask
    Returns         how many tokens equal pad, and are taken for padding; C, which checks each
                    number before it goes there: -1 where one leads out of its array
    """
    tokens, labels, loss_mask, position_ids, cu_seqlens, max_seqlen, attention_mask = outputs
    (items, pointers, lengths), (extra, pad, eod, by_eod, mask_loss, reset_mask) = corpus, settings
    length, pads = tokens.shape[1], 0
    for row, k in zip(places, wanted):
        text, size, starts = np.full(length + 1, pad, np.int64), 0, [0]
        for i, offset, n in _pieces(k, lengths, *indices, extra):
            text[size:size + n] = items[pointers[i] // items.itemsize + offset:][:n]
            starts += [size] * (n > 0 and 0 < size < length)
            size += n
        is_pad, is_eod = text == pad, text[:-1] == eod
        pads, after_eod = pads + int(is_pad[:size].sum()), (np.flatnonzero(is_eod) + 1).tolist()
        text[is_pad] = 0  # the embedding must be able to look it up
        tokens[row], labels[row] = text[:-1], text[1:]
        loss_mask[row] = ~(is_pad[1:] | is_eod & bool(mask_loss))
        if attention_mask is not None:
            attention_mask[row] = np.triu(np.ones((length, length), bool), 1)
            for at in after_eod if reset_mask else ():
                attention_mask[row, 0, at:, :at] = True
        if cu_seqlens is None:
            starts = [0] + after_eod * bool(by_eod)
        else:
            cu_seqlens[row], cu_seqlens[row, :len(starts)] = length, starts
            max_seqlen[row] = np.diff([*starts, length]).max()
        for start, end in itertools.pairwise([*starts, length]):
            position_ids[row, start:end] = np.arange(end - start)
    return pads

def _pieces(k, lengths, document_index, sample_index, shuffle_index, extra):
    """Sample k -> [(sequence, offset, length), ...], as they follow each other; or IndexError."""
    j = int(shuffle_index[k])
    edges = first, begin, last, end = (*sample_index[j:j + 2].ravel().tolist(), -1, -1, -1, -1)[:4]
    sequences = document_index[max(first, 0):last + 1].tolist()
    if min(edges) < 0 or len(sequences) != last + 1 - first or min(sequences, default=-1) < 0:
        raise IndexError(f"sample {k} is row {j} of sample_index, {edges}, and sequences "
                         f"{sequences[:9]}, of {len(document_index)} documents: rebuild the cache")
    ends = [int(lengths[i]) for i in sequences[:-1]] + [end + extra]
    begins = itertools.chain([begin], itertools.repeat(0))
    return [(i, low, high - low) for i, low, high in zip(sequences, begins, ends)]

IMPLEMENTATION = "python"  # or "c": which kernels are in use
_kernels = types.SimpleNamespace(
    **{name[4:]: value for name, value in globals().items() if name.startswith("_py_")})
if os.environ.get("MEGATRON_MIN_C") != "0":
    try:
        import _megatron_min as _kernels
        IMPLEMENTATION = "c"
    except ImportError:
        if os.environ.get("MEGATRON_MIN_C") == "1":
            raise  # asked for C: never fall back silently

def count_samples(tokens, sequence_length, drop_last_partial_sequence=True,
                  add_extra_token_to_sequence=True):
    """Samples in a stream of so many tokens, in exact integers.

    >>> count_samples(13, 4), count_samples(14, 4, drop_last_partial_sequence=False)
    (3, 4)
    """
    whole, rest = divmod(max(0, tokens - bool(add_extra_token_to_sequence)), sequence_length)
    return whole + (rest > 0 and not drop_last_partial_sequence)

def build_sample_idx(sizes, document_indices, sequence_length, num_epochs, tokens_per_epoch,
                     drop_last_partial_sequence=True, add_extra_token_to_sequence=True):
    """Where every sample starts in the stream: the documents of document_indices, laid end to end.
    Sample k is tokens [k*S, k*S + S + x): with x = 1 its last label is read again by sample k+1.

    sizes             int32 (sequences of the file,)  tokens in each
    document_indices  int32 (E*D,)                    which sequence comes d-th in the stream
    sequence_length   int >= 1                        S, without the extra token
    tokens_per_epoch  int                             the stream holds num_epochs times as many
    Returns           int32 (N+1, 2)                  row k: d and offset in it of sample k's first
                      (int64 from E*D = 2**31 on)     token; row N is where sample N-1 stops
    Raises            ValueError                      S < 1, or a stream too short for its samples
                      IndexError                      an entry of document_indices is no sequence
    Cost              O(N + E*D) time, 8 bytes a row
    Upstream          helpers.build_sample_idx, whose number of samples with a partial last one is
                      rounded to float32.  x = 0: a row may point one past a document's end, too.

    >>> sizes = np.array([4, 3, 6], np.int32)               # aaaa bbb cccccc
    >>> build_sample_idx(sizes, np.arange(3, dtype=np.int32), 4, 1, 13).tolist()
    [[0, 0], [1, 0], [2, 1], [2, 5]]
    """
    sizes = _checked(sizes, "sizes", np.int32)
    documents = _checked(document_indices, "document_indices", np.int32)
    extra, tokens = int(bool(add_extra_token_to_sequence)), int(num_epochs) * int(tokens_per_epoch)
    _require(1 <= (sequence_length := operator.index(sequence_length)) < 2**32,
             f"sequence_length must be 1 to 2**32 - 1, got {sequence_length}")
    _require(0 <= tokens <= len(documents) * 2**31 and num_epochs >= 0,
             f"{len(documents)} documents cannot hold {tokens} tokens")
    num_samples = count_samples(tokens, sequence_length, drop_last_partial_sequence, extra)
    # upstream asks for int64 where a size needs it too; sizes are int32, so none can
    sample_index = np.empty((num_samples + 1, 2), np.int32 if len(documents) < 2**31 else np.int64)
    last_token = min(tokens, num_samples * sequence_length + extra)
    # the kernel, on as many parts of documents as there are cores, each of less than 2**31
    parts = max(1 + (len(documents) >> 31), min(os.cpu_count() or 1, len(documents) // _PART))
    edges = [len(documents) * half // (2 * parts) for half in range(2 * parts + 1)]
    def fill(begin, end, low, high, before):  # the rows low .. high - 1
        last = min(last_token, (high - 1) * sequence_length + extra)
        return _kernels.build_sample_idx(sample_index[low:high], sizes, documents[begin:end],
                                         sequence_length, extra, last, low, begin, before)
    with concurrent.futures.ThreadPoolExecutor(parts) as pool:
        # no rows: to count the tokens, of all parts but the last
        counts = pool.map(fill, edges[:-3], edges[1:], *[itertools.repeat(0)] * 3)
        before = [*itertools.accumulate(counts, initial=0)][::2]
        lows = [(tokens - extra) // sequence_length + 1 if tokens < last_token else
                len(sample_index) for tokens in before[1:]]  # of the first target behind so many
        [*pool.map(fill, edges[::2], edges[2::2], [0, *lows], [*lows, len(sample_index)], before)]
    if last_token < num_samples * sequence_length and not extra:  # UPSTREAM: a last, partial sample
        sample_index[-1] = len(documents) - 1, sizes[documents[-1]]  # takes the empty documents
    return sample_index

def _checked(values, name, *dtypes, out=False):
    """A 1-D array of one of dtypes, contiguous, and writable if out; TypeError or ValueError."""
    kind = getattr(values, "dtype", type(values).__name__)
    _require(kind in dtypes, f"{name} must be {np.dtype(dtypes[0])}, got {kind}", TypeError)
    fit = values.ndim == 1 and (not out or values.flags.carray)
    _require(fit, f"{name} must be 1-D{', contiguous, writable' * out}, got shape {values.shape}, "
             f"strides {values.strides}")
    return np.ascontiguousarray(values)

def shuffle(items, random_state):
    """Shuffle a 1-D array in place, exactly as random_state.shuffle(items), several times faster.

    items int32, uint32 or int64, contiguous (TypeError, ValueError for others); random_state a
    numpy.random.RandomState, left as by its own shuffle.  O(n): for i = n-1 .. 1, items[i] and
    items[j] are swapped, j uniform in [0, i] by masked rejection of 32-bit draws.

    >>> items = np.arange(6, dtype=np.int32)
    >>> shuffle(items, np.random.RandomState(1234)); items.tolist()
    [2, 1, 5, 0, 4, 3]
    """
    _checked(items, "items", np.int32, np.uint32, np.int64, out=True)
    name, key, position, *normal = random_state.get_state()  # key is a copy
    random_state.set_state((name, key, _kernels.shuffle(items, key, position), *normal))

def build_blending_indices(dataset_index, dataset_sample_index, weights, num_datasets, size,
                           verbose=False):
    """Fill in, for each sample of a blend, its dataset and its place in that dataset.

    Sample i comes from the dataset furthest behind: the largest weights[d] * max(i, 1) - taken[d]
    in IEEE doubles, the lowest d among equals.  With weights 0.25 and 0.75 sample 0 comes from
    dataset 1; sample 1 from dataset 0, since 0.25 > 0.75 - 1; sample 2 from 1, 2 * 0.75 - 1 ahead.

    Fills int16 and int64 (size,); weights float64 (num_datasets,), normalized; verbose is unused.
    Upstream: helpers.build_blending_indices.

    >>> which, sample = np.zeros(4, np.int16), np.zeros(4, np.int64)
    >>> build_blending_indices(which, sample, [0.25, 0.75], 2, 4); which.tolist(), sample.tolist()
    ([1, 0, 1, 1], [0, 0, 1, 2])
    """
    shares = np.array(weights[:num_datasets], np.float64)  # a copy, which no output overlaps
    outputs = dataset_index, dataset_sample_index
    _fill_blend(_kernels.build_blending_indices, outputs, shares, num_datasets, size)

def build_exhaustive_blending_indices(dataset_index, dataset_sample_index, sizes, num_datasets):
    """The same with weights sizes[d] / sum(sizes), until each dataset has given sizes[d] samples.
    Fills int16 and int64 (sum(sizes),).  Upstream: helpers.build_exhaustive_blending_indices.

    >>> which, sample = np.zeros(4, np.int16), np.zeros(4, np.int64)
    >>> build_exhaustive_blending_indices(which, sample, [1, 3], 2); which.tolist()
    [1, 0, 1, 1]
    """
    counts, outputs = np.array(sizes[:num_datasets], "i8"), (dataset_index, dataset_sample_index)
    _require(np.array_equal(counts, sizes[:num_datasets]), f"sizes: no whole numbers: {sizes}")
    _fill_blend(_kernels.build_exhaustive_blending_indices, outputs, counts, num_datasets)

def _fill_blend(kernel, outputs, weights, num_datasets, *sizes):
    """Check what a blending kernel must be able to trust, and call it; exhaustive without size."""
    size = sizes[0] if sizes else sum(weights.tolist())  # Python's integers: int64 may overflow
    for out, name, dtype in zip(outputs, ("dataset_index", "dataset_sample_index"), ("i2", "i8")):
        _checked(out, name, dtype, out=True)
        _require(0 <= size <= len(out), f"{name} has {len(out)} places for {size} samples")
    _require(not np.may_share_memory(*outputs), "the outputs overlap")
    _require(0 < num_datasets < 32767 and len(weights) == num_datasets,
             f"num_datasets must be 1 to 32766, each with a weight, got {num_datasets}")
    for d, weight in enumerate(weights.tolist()):
        _require(0 <= weight < math.inf, f"weight of dataset {d}: wanted >= 0, got {weight}")
    kernel(*outputs, weights, num_datasets, *sizes)

# ==============================================================================
# 5. GPTDataset and its cache
# ==============================================================================
# Question answered here: what are the tokens of sample k?
#
#   k --shuffle_index--> j --sample_index[j], [j + 1]--> (d, offset) .. (d', offset')
#     --document_index[d .. d']--> sequences of the file pair --> S + x tokens
#
#   positions              0 1 2 3 4 5 6 7 8 9 . . .       S = 4, x = 1: 13 tokens hold 3 samples
#   stream                 a a a a b b b c c c c c c
#   sample 0               a a a a b                      inputs are all but the last token, labels
#   sample 1                       b b b c c              all but the first; so neighbours share one
#   sample 2                               c c c c c      token, and no label is lost between them
#
# The three arrays depend on lengths, split, number of samples, S and seed alone: built once, they
# are cached, and every rank and later job maps the same files.  A manifest, which upstream has not,
# is written last and says what they were made from:
#
#   <hash>-GPTDataset-train-description.txt      what was asked for; hash is its md5
#                          -document_index.npy   and -sample_index.npy, -shuffle_index.npy
#                          -manifest.json        the .idx, the settings, size and CRC-32 of arrays
#
#   found                                          then
#   nothing                                        built
#   all, manifest matches                          used (the CRCs are read by rank 0)
#   all, no manifest (upstream's), or a .idx       every array is compared with one made anew; used,
#     of another time (a copied corpus)              and given a manifest
#   anything else: torn, altered, other data       built anew, with a warning that says why

_SAMPLE_KEYS = "tokens labels loss_mask position_ids cu_seqlens max_seqlen attention_mask".split()
Geometry = collections.namedtuple(
    "Geometry", "num_epochs num_samples separate_final_epoch num_samples_sans_final_epoch")

def epoch_geometry(tokens_per_epoch, num_samples, sequence_length, drop_last_partial_sequence=True,
                   add_extra_token_to_sequence=True):
    """How many epochs give num_samples samples (None: one epoch), and is the last shuffled apart?

    E is the least with E*T >= num_samples*S + x; the last is apart when fewer than 80 % of its
    samples are wanted: shuffled with the others, it would displace some of theirs.  ValueError
    for samples of no tokens (upstream never returns).

    >>> epoch_geometry(13, 4, 4)  # 13 tokens hold 3 samples of 4 + 1
    Geometry(num_epochs=2, num_samples=6, separate_final_epoch=True, num_samples_sans_final_epoch=3)
    """
    tokens, length, extra = tokens_per_epoch, sequence_length, int(add_extra_token_to_sequence)
    _require((num_samples or 0) >= 0, f"wanted num_samples >= 0, got {num_samples}")
    _require(tokens or not num_samples, f"{num_samples} samples of a split that holds no tokens")
    epochs = max(1, -(-(num_samples * length + extra) // tokens)) if num_samples else 1
    total = count_samples(epochs * tokens, length, drop_last_partial_sequence, extra)
    sans_final = count_samples((epochs - 1) * tokens, length, True, extra)
    apart = epochs > 1 and num_samples - sans_final < int(0.80 * ((tokens - extra) // length))
    return Geometry(epochs, total, apart, sans_final)

def build_document_index(documents, num_epochs, random_state, separate_final_epoch):
    """documents repeated num_epochs times and shuffled, the last epoch apart if so asked.

    int32 (D,) -> int32 (E*D,), and no more memory.  Upstream: _build_document_index.  All epochs
    but the last are one pile: a document may come twice before another comes once.

    >>> build_document_index([0, 1, 2], 2, np.random.RandomState(1234), False).tolist()
    [2, 1, 2, 0, 1, 0]
    """
    document_index = np.tile(np.asarray(documents, np.int32), num_epochs)
    edge = len(document_index) - (len(documents) if separate_final_epoch else 0)
    shuffle(document_index[:edge], random_state)
    shuffle(document_index[edge:], random_state)  # draws nothing if there is no rest
    return document_index

def build_shuffle_index(num_samples, total_size, random_state):
    """arange(total_size), the first num_samples shuffled, then the rest; uint32, int64 from
    2**32 - 2 up.  Upstream: _build_shuffle_index.

    >>> build_shuffle_index(3, 6, np.random.RandomState(3)).tolist()     # 0 1 2 stay before 3 4 5
    [1, 0, 2, 3, 5, 4]
    """
    index = np.arange(total_size, dtype=np.uint32 if total_size < 2**32 - 2 else np.int64)
    shuffle(index[:num_samples], random_state)
    shuffle(index[num_samples:], random_state)
    return index

class _CachedIndices:
    """Mixin: index arrays, built or loaded and pickled as paths, of a class that has index_files,
    source() -> what they are made of, and a time or None, and _build_arrays(); and batches, if it
    has _parts(indices) -> [(d, rows of a batch, their indices in sources[d]), ...]."""
    def _prepare_indices(self, folder, split, identifiers):
        """Describe, then load, or build and keep; without a folder the arrays stay in memory."""
        _describe(self, identifiers)
        stem = f"{self.unique_description_hash}-{type(self).__name__}-{split.name}-"
        self._base, self._arrays = folder and os.path.join(folder, stem), None
        read = operator.attrgetter("__getitem__", "__getitems__")
        self._is_plain = read(type(self)) == read(_CachedIndices)  # no subclass changes the samples
        if not folder:
            self._arrays = self._build_arrays()
        elif not self.config.fast_cache_load or not self._is_cached():
            self._arrays = self._load() or self._save(self._build_arrays())
            if self.config.defer_npy_index_mmap and self._is_cached():
                self._arrays = None

    def _is_cached(self):
        """Are the files there without which upstream sees no cache?"""
        files = *self.index_files, "description.txt"
        return self._base and all(os.path.isfile(self._base + file) for file in files)

    def _index(self, at=slice(None)):
        """Array number at, or all: mapped at first use, read-only; nothing is ever unpickled."""
        self._arrays = self._arrays or [np.load(self._base + file, "r").view(np.ndarray)
                                        for file in self.index_files]
        return self._arrays[at]

    def _load(self):
        """The cached arrays; None if there are none or, with a warning why, none that are right."""
        names = "manifest.json", "description.txt"  # whoever is at it writes these two last
        manifest, text = (pathlib.Path(self._base + name) for name in names)
        try:
            if not manifest.exists() and not text.exists():
                return None
            _require(text.read_text("utf-8") == self.unique_description, "another's description")
            found = json.loads(manifest.read_text("utf-8")) if manifest.exists() else {}
            now = self._manifest(found.get("files") if _rank() else None)
            for key in found.keys() - {"mtime_ns"}:
                _require(found[key] == now[key], f"{key}: noted {found[key]}, now {now[key]}")
            if found != now:  # upstream's cache, or a copy: only the time differs
                for file, old, new in zip(self.index_files, self._index(), self._build_arrays()):
                    _require(old.dtype == new.dtype and np.array_equal(old, new),
                             f"{file} is not what the data and the settings make")
                self._vouch()
            return self._index()
        except Exception as error:  # a cache is never needed: whatever is wrong, build it anew
            warnings.warn(f"the cache {self._base} is rebuilt: {type(error).__name__}: {error}")

    def _manifest(self, known=None):
        """What vouches for the files as they are; known CRCs are not read (a second a GiB)."""
        data = {file: _map_file(self._base + file) for file in self.index_files}
        return dict(zip(("source", "mtime_ns"), self.source())) | {"files": {
            file: {"size": len(data), "crc32": known[file]["crc32"] if known else zlib.crc32(data)}
            for file, data in data.items()}}

    def _save(self, arrays):
        """Write all, the manifest last -> the arrays, mapped; as they are if the folder refuses."""
        try:
            os.makedirs(os.path.dirname(self._base), exist_ok=True)
            pathlib.Path(self._base + "manifest.json").unlink(missing_ok=True)
            for name, values in zip(self.index_files, arrays):
                with _NewFile(self._base + name) as file:  # tofile() would miss a full disk
                    np.save(types.SimpleNamespace(write=file.write), values, allow_pickle=False)
            with _NewFile(self._base + "description.txt") as file:
                file.write(self.unique_description.encode())
            self._vouch()
            self._arrays = None  # those of an older cache
            return self._index()
        except OSError as error:
            warnings.warn(f"the index cache {self._base} cannot be written ({error}): the indices "
                          "stay in memory; set path_to_cache to a folder that can")
            return arrays

    def _vouch(self):
        """Write the manifest; a folder that is read-only stays without."""
        with contextlib.suppress(OSError), _NewFile(self._base + "manifest.json") as file:
            file.write(json.dumps(self._manifest(), indent=4).encode())

    def __getitem__(self, idx):
        return _samples(self._batch(self._parts([idx])))[0]

    def __getitems__(self, indices):
        """Samples of indices (None: padding), a list of dicts, made as one batch; none overlap."""
        if type(self).__getitem__ is not _CachedIndices.__getitem__ or not len(indices):
            return [self[i] for i in indices]
        parts = self._parts([*indices])
        return ([(d, rows, wanted, self.sources[d]._gather(wanted)) for d, rows, wanted in parts]
                if self._ships is not None else _samples(self._batch(parts)))
    _ships = None  # number of a worker of our own loader: its batches leave as _gather() made them

    def _batch(self, parts):
        """Parts of a batch, made by _parts() here or in a worker -> {key: array (B, ...)}."""
        config, count = self.config, sum([len(part[1]) for part in parts])
        masked = config.create_attention_mask and not config.inter_document_masking
        layout = _layout(count, config.sequence_length, masked, config.inter_document_masking)
        columns = {key: np.empty(shape, dtype) for key, (shape, dtype) in layout.items()}
        for d, *part in parts:
            self.sources[d]._fill(columns, *part)
        return columns

    def __getstate__(self):
        """Without arrays that the other process can map."""
        return self.__dict__ | ({"_arrays": None} if self._is_cached() else {})

def _samples(batch):
    """{key: array (B, ...)} -> B dicts, whose tensors are its rows."""
    if isinstance(batch, list):  # of samples that came one by one
        return batch
    return [{key: values[row] if key == "dataset_id" else torch.from_numpy(values[row, ...])
             for key, values in batch.items()} for row in range(len(batch["tokens"]))]

@functools.cache
def _layout(rows, length, masked, packed):
    """{key: (shape, name of the dtype in numpy and torch)} of a batch."""
    keys, row = ("tokens", "labels", "position_ids"), (rows, length)
    mask = {"attention_mask": ((rows, 1, length, length), "bool")} if masked else {}
    packing = [((rows, length + 1), "int32"), ((rows,), "int32")] if packed else []
    return (dict.fromkeys(keys, (row, "int64")) | {"loss_mask": (row, "float32")} | mask
            | dict(zip(("cu_seqlens", "max_seqlen"), packing)))

def _is_distributed():
    """Is this one of several processes of a job?"""
    return torch.distributed.is_available() and torch.distributed.is_initialized()

def _rank(group=None):
    """This process's rank in a group, by default of all; 0 without torch.distributed."""
    return torch.distributed.get_rank(group) if _is_distributed() else 0

def _describe(dataset, identifiers):
    """Set unique_identifiers, the text of them that upstream writes, and the md5 of the text."""
    dataset.unique_identifiers = collections.OrderedDict(identifiers)
    dataset.unique_description = json.dumps(
        dataset.unique_identifiers, indent=4, default=lambda obj: obj.unique_identifiers)
    dataset.unique_description_hash = _md5(dataset.unique_description)

class MegatronDataset(abc.ABC, torch.utils.data.Dataset):
    """The base of datasets that the builder can build.  Upstream: MegatronDataset.

    dataset and dataset_path   what build_low_level_dataset made of what; path may be None
    indices                    int32: the elements of dataset that belong to this split
    num_samples                how many are wanted; None: one epoch
    A subclass opens the data, build_low_level_dataset(dataset_path, config), and counts the
    elements that the split matrix cuts, numel_low_level_dataset(opened).
    """
    def __init__(self, dataset, dataset_path, indices, num_samples, index_split, config):
        dataset_path = None if dataset_path is None else os.fspath(dataset_path)
        num_samples = None if num_samples is None else int(num_samples)
        self.dataset, self.dataset_path, self.indices = dataset, dataset_path, np.asarray(indices)
        self.num_samples, self.index_split, self.config = num_samples, index_split, config
        key = {"class": type(self).__name__, "dataset_path": dataset_path,
               "num_samples": num_samples, "index_split": index_split.name}
        _describe(self, key | {key: getattr(config, key) for key in self._key_config_attributes()})

    @staticmethod
    def _key_config_attributes():
        """The fields of the config that change the arrays; a subclass may add some."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]
    build_low_level_dataset = staticmethod(abc.abstractmethod(lambda dataset_path, config: None))
    numel_low_level_dataset = staticmethod(abc.abstractmethod(lambda low_level_dataset: None))
    __len__ = __getitem__ = abc.abstractmethod(lambda self, *idx: None)

class GPTDataset(_CachedIndices, MegatronDataset):
    """Samples of S tokens, cut from the shuffled documents laid end to end.  Upstream: GPTDataset.

    indexed_dataset   IndexedDataset; its path prefix, dataset_path, enters the cache's key
    indexed_indices   int32 (D,)  the sequences of this split
    num_samples       at least so many; None: those of one epoch
    ds[k] is a dict   tokens, labels, position_ids int64 (S,), loss_mask float32 (S,);
                      attention_mask bool (1, S, S), True = may not attend, if the config wants it;
                      cu_seqlens int32 (S+1,), max_seqlen int32 () with inter_document_masking
    ds[None]          sample 0 with no loss: the padding of a batch
    Cost              to build: O(E*D + N); a sample: one read for each document it touches

    >>> prefix, config = toy_corpus(), GPTDatasetConfig(1234, 4, blend=(["toy"], None), split="1",
    ...     tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> all_documents = np.arange(3, dtype=np.int32)
    >>> ds = GPTDataset(IndexedDataset(prefix), prefix, all_documents, 3, Split.train, config)
    >>> ds.document_index.tolist(), ds.sample_index.tolist(), ds.shuffle_index.tolist()
    ([0, 1, 2], [[0, 0], [1, 0], [2, 1], [2, 5]], [1, 2, 0])
    >>> ByteTokenizer().detokenize(ds[0]["tokens"]), ByteTokenizer().detokenize(ds[0]["labels"])
    ('bbbc', 'bbcc')
    """
    index_files = "document_index.npy", "sample_index.npy", "shuffle_index.npy"
    numel_low_level_dataset = staticmethod(len)  # sequences in the file

    def __init__(self, indexed_dataset, dataset_path, indexed_indices, num_samples, index_split,
                 config):
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split,
                         config)
        n, dtype = len(indexed_dataset), np.dtype(getattr(indexed_dataset, "dtype", np.int64))
        low, high = (int(self.indices[0]), int(self.indices[-1])) if len(self.indices) else (0, -1)
        least, most = self.indices.min(initial=low), self.indices.max(initial=high)
        _require(0 <= least and most < n < 2**31, f"{_name(self)}: documents {least} .. {most} of "
                 f"{n}, and document_index, int32, can name {2**31 - 1}", IndexError)
        is_run = high - low < len(self.indices) and np.all(self.indices[1:] > self.indices[:-1])
        # one run of documents, first .. end - 1, or with a digest of them
        self._documents = [low, high + 1, None if is_run else _md5(str(self.indices.tolist()))]
        _require(dtype.kind in "iu", f"{_name(self)} holds {dtype}: token ids must be integers")
        self._pad_token_id = _pad_token_id(config)
        self._extra = bool(config.add_extra_token_to_sequence)
        drop = config.drop_last_partial_validation_sequence
        self._keep_partial = index_split is Split.valid and not drop  # the last, short sample
        folder = config.path_to_cache or dataset_path is not None and (
            f"{self.dataset.path_prefix}/cache/{type(self).__name__}_indices")
        self._prepare_indices(folder, index_split, self.unique_identifiers | self._unusual())
        flags = config.reset_position_ids, config.eod_mask_loss, config.reset_attention_mask
        eod = config.tokenizer.eod if any(flags) else None  # None becomes one that no token equals
        self._settings = (int(self._extra), self._pad_token_id, -2**63 if eod is None else eod,
                          *map(bool, flags))
        last = [indexed_dataset.get(i)[-1:] for i in self.indices[:16].tolist() if any(flags)]
        if any(map(len, last)) and not any(eod in token for token in last):
            warnings.warn(f"{_name(self)}: none of the first {len(last)} documents ends in eod, so "
                          "resets and eod_mask_loss find nothing: tokenize with --append-eod?")

    def __getstate__(self):
        """Without the arrays that the other process can map, or make from a first and a last."""
        low, high, scattered = self._documents
        return super().__getstate__() | ({} if scattered else {"indices": range(low, high)})

    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        """Open the pair at dataset_path."""
        _require(dataset_path is not None, "no blend is given: give one, or build MockGPTDataset")
        check = False if config.fast_cache_load else None
        return IndexedDataset(dataset_path, mmap=config.mmap_bin_files, check=check,
                              verify_reads=config.verify_reads)

    def _unusual(self):
        """What else the arrays depend on, where upstream's key is wrong; {} where it is right."""
        bounds = (self.config.split_matrix or [None] * 3)[self.index_split.value] or (0, 1)
        low, high = split_range(bounds, len(self.dataset))
        found = [("add_extra_token_to_sequence", self._extra, True),
                 ("drop_last_partial_validation_sequence", not self._keep_partial, True),
                 ("documents", self._documents, [low, high, None] if low < high else [0, 0, None])]
        return {key: value for key, value, usual in found if value != usual}

    def source(self):
        """What the arrays are made of: {documents, settings, identity of the .idx}, its time."""
        source = {"format": 1, "documents": self._documents, "keep_partial": self._keep_partial,
                  "extra_token": self._extra}
        if not isinstance(self.dataset, IndexedDataset):
            return source, None
        stat, index = self.dataset._stat, self.dataset._index  # of what was opened
        ends = _md5(index[:1 << 16].tobytes() + index[-1 << 16:].tobytes())  # regenerated?
        return source | {"idx_size": stat.st_size, "idx_ends": ends}, stat.st_mtime_ns

    def tokens_per_epoch(self):
        """T: the tokens of the split's documents."""
        which = self.indices if self._documents[2] else slice(*self._documents[:2])  # not a copy
        return int(self.dataset.sequence_lengths[which].sum(dtype=np.int64))

    def _build_arrays(self):
        """One generator draws documents, then samples, as upstream, while verify() has a thread."""
        with concurrent.futures.ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as stack:
            stack.callback(thread.submit(getattr(self.dataset, "verify", bool)).result)
            tokens, wanted, config = self.tokens_per_epoch(), self.num_samples, self.config
            _require(tokens or not wanted, f"{_name(self)}: {self.index_split.name} of split "
                     f"{config.split!r} holds no tokens for {wanted} samples: enlarge it")
            length, *how = config.sequence_length, not self._keep_partial, self._extra
            epochs, total, apart, sans_final = epoch_geometry(tokens, wanted, length, *how)
            random_state = np.random.RandomState(config.random_seed)
            document_index = build_document_index(self.indices, epochs, random_state, apart)
        sample_index = build_sample_idx(
            self.dataset.sequence_lengths, document_index, length, epochs, tokens, *how)
        edge = sans_final if apart else total
        return [document_index, sample_index, build_shuffle_index(edge, total, random_state)]

    document_index = property(lambda self: self._index(0), doc="int32 (E*D,): order of documents")
    sample_index = property(lambda self: self._index(1), doc="(N+1, 2): where each sample starts")
    shuffle_index = property(lambda self: self._index(2), doc="uint32 (N,): order of samples")

    def __len__(self):
        return len(self.sample_index) - 1

    sources = property(lambda self: [self], doc="the datasets of which batches are made")

    def _parts(self, indices):
        """A batch of this dataset alone has one part."""
        return [(0, range(len(indices)), indices)]

    def _fill(self, columns, rows, indices, gathered=None):
        """Write the samples of indices (None: padding) into these rows of columns: from the mapped
        .bin file, or from the little corpus that _gather() made of them, here or in a worker."""
        low, outputs, pads = self.dataset, tuple(map(columns.get, _SAMPLE_KEYS)), -1
        read = functools.partial(_kernels.read_samples, outputs, array.array("q", rows))
        direct = type(low) is IndexedDataset and low.mmap and not low.verify_reads
        if IMPLEMENTATION == "c" and gathered is None and direct:
            corpus = low._tokens, low.sequence_pointers, low.sequence_lengths
            documents, edges, order = self._index()
            with contextlib.suppress(OverflowError):  # an index beyond 2**63
                wanted = array.array("q", [0 if k is None else k for k in indices])
                pads = read(wanted, corpus, (documents, edges, order[:len(self)]), self._settings)
        if pads < 0:  # it is not mapped; or something is wrong, and _gather() can say what
            wanted, *both = gathered or self._gather(indices)
            pads = read(wanted, *map(tuple, both), self._settings)  # torch may make them lists
            _require(pads >= 0, f"{_name(self)}: samples {indices[:9]} have pieces that do not fit")
        if pads:  # said once, as Python does with equal warnings; upstream is silent
            warnings.warn(f"{_name(self)}: real tokens equal the pad id {self._pad_token_id}: they "
                          "become 0 without loss, as in Megatron-LM")
        if None in indices:
            columns["loss_mask"][[row for row, k in zip(rows, indices) if k is None]] = 0

    def _gather(self, indices):
        """Samples, read piece by piece: a corpus of them alone, whose sample_index has two rows for
        each -> wanted, corpus, indices of _py_read_samples."""
        low, name, extra = self.dataset, f"the samples of {_name(self)}", self._extra
        most, rows, found = self.config.sequence_length + extra, [], []
        source = low.sequence_lengths, *self._index(), extra
        for k in indices:
            pieces = _pieces(_position(k, len(self), name) if k else 0, *source)
            if (size := sum(n for _, _, n in pieces)) > most:
                raise ValueError(f"{name}: wanted {most} tokens, got {size}: rebuild the cache")
            rows += (len(found), 0), (len(found) + len(pieces) - 1, pieces[-1][2] - extra)
            found += pieces
        texts, wanted = [low.get(*piece) for piece in found], np.arange(len(indices))
        tokens, sizes = np.concatenate(texts), np.array([*map(len, texts)], np.int32)
        tokens = tokens if type(low) is IndexedDataset else tokens.astype(np.int64)
        pointers = (np.cumsum(sizes, dtype=np.int64) - sizes) * tokens.itemsize
        order = np.arange(len(found), dtype=np.int32)
        return wanted, (tokens, pointers, sizes), (order, np.array(rows), 2 * wanted)

def _name(dataset):
    """What to call a dataset in a message: its path, or its class."""
    return str(getattr(dataset, "dataset_path", None) or type(dataset).__name__)

def _pad_token_id(config):
    """The id that fills short samples: the tokenizer's pad; -1 if none, or if it is ambiguous."""
    tokenizer = config.tokenizer
    pad, special = (getattr(tokenizer, name, None) for name in ("pad", "special_tokens_dict"))
    special = {name: token for name, token in (special or {}).items() if name != "pad_token"}
    special = special or {name: getattr(tokenizer, name, None) for name in ("eos", "eod")}
    same = [name for name, token in special.items() if token == pad]
    if pad is not None and same and not config.allow_ambiguous_pad_tokens:
        warnings.warn(f"the pad id {pad} is also the tokenizer's {' and '.join(same)}: padding is "
                      "-1, so that real tokens keep their loss (see allow_ambiguous_pad_tokens)")
        return -1
    return -1 if pad is None else int(pad)

class MockGPTLowLevelDataset:
    """Sequence i is 1, 2, ..., length - 1 (mod vocabulary), then eod.  Upstream: the same name."""
    def __init__(self, tokenizer):
        self.tokenizer, generator = tokenizer, np.random.default_rng(0)
        self.sequence_lengths = generator.integers(1, 4096, size=100_000, dtype=np.int32)

    def __len__(self):
        return len(self.sequence_lengths)

    def __getitem__(self, idx):
        length, vocab_size = self.sequence_lengths[idx], self.tokenizer.vocab_size
        return np.append(np.arange(1, length, dtype=np.int64) % vocab_size, self.tokenizer.eod)

    def get(self, idx, offset=0, length=None):
        """As IndexedDataset.get."""
        return self[idx][offset:None if length is None else offset + length]

class MockGPTDataset(GPTDataset):
    """Samples of numbers counted up, for speed runs without data.  Upstream: MockGPTDataset."""
    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        """100,000 sequences of 1 to 4,095 tokens; dataset_path is not used."""
        return MockGPTLowLevelDataset(config.tokenizer)

# ==============================================================================
# 6. BlendedDataset
# ==============================================================================
# Question answered here: which dataset, and which of its samples, is sample i of the blend?
#
#   weights 0.25, 0.75     i                      0  1  2  3    the dataset that is furthest behind
#                          dataset_index          1  0  1  1    its weight comes next, so after any
#                          dataset_sample_index   0  0  1  2    number of samples all are near it

class BlendTooLarge(ValueError):
    """A blend asks a dataset for more samples than it holds; needed is {dataset: samples}."""
    def __init__(self, message, needed=None):
        super().__init__(message)
        self.needed = needed

class BlendedDataset(_CachedIndices, torch.utils.data.Dataset):
    """Several datasets as one, mixed by weight.  Upstream: BlendedDataset.

    datasets   MegatronDatasets of one split, fewer than 32767
    weights    finite numbers >= 0; a dataset of weight 0 is dropped, with a note
    size       samples; None: weights are counts, and dataset d gives exactly weights[d] samples
    ds[i]      {"dataset_id": int16, **the sample}; ds[None] is padding, as of its first dataset
    Raises     BlendTooLarge where upstream would fail in the middle of a run
    """
    index_files = "dataset_index.npy", "dataset_sample_index.npy"
    dataset_index = property(lambda self: self._index(0), doc="int16 (size,): whose sample it is")
    dataset_sample_index = property(lambda self: self._index(1), doc="int64 (size,): which of them")

    def __init__(self, datasets, weights, size, config):
        _check_weights(weights, names := [_name(dataset) for dataset in datasets])
        _require(all(w == int(w) for w in weights) if size is None else size >= 0, "wanted size "
                 f">= 0, or None and numbers of samples as weights, got {size} and {list(weights)}")
        self.datasets, weights = _drop_zeros(datasets, weights, names)
        self.weights = [int(w) for w in weights] if size is None else normalize(weights)
        self.sources, self.config = self.datasets, config
        self.split, self.size = self.datasets[0].index_split, None if size is None else int(size)
        key = {"class": type(self).__name__,
               "datasets": [dataset.unique_identifiers for dataset in self.datasets],
               "split": self.split.name, "weights": self.weights, "size": self.size}
        self._prepare_indices(config.path_to_cache, self.split, key)
        self._is_plain &= all(isinstance(ds, GPTDataset) and ds._is_plain and ds.config is config
                              for ds in self.datasets)
        if config.fast_cache_load or config.defer_npy_index_mmap:
            return
        taken = sum(np.bincount(self.dataset_index[at:at + _CHUNK], minlength=len(self.datasets))
                    for at in range(0, len(self) or 1, _CHUNK))  # one chunk at least
        if over := {ds: n for ds, n in zip(self.datasets, taken) if n > len(ds)}:
            # not kept in a local: the traceback would be a cycle that holds all the files
            raise BlendTooLarge("; ".join(f"the blend takes {n} samples of {_name(ds)}, which has "
                                          f"{len(ds)}" for ds, n in over.items()), over)

    def source(self):
        """Nothing: all that a blend is made of is in its description."""
        return {"format": 1}, None

    def _build_arrays(self):
        arrays = [np.zeros(len(self), np.int16), np.zeros(len(self), np.int64)]
        if self.size is None:
            build_exhaustive_blending_indices(*arrays, self.weights, len(self.datasets))
        else:
            build_blending_indices(*arrays, self.weights, len(self.datasets), self.size)
        return arrays

    def __len__(self):
        return sum(self.weights) if self.size is None else self.size

    def _parts(self, indices):
        """The rows of a batch, by the dataset that they come from; padding is of the first."""
        parts = collections.defaultdict(lambda: ([], []))  # d -> rows, indices
        for row, i in enumerate(indices):
            at = None if i is None else _position(i, len(self), "the samples of a blend")
            d, k = (0, None) if i is None else [int(array[at]) for array in self._index()]
            parts[d][0].append(row), parts[d][1].append(k)
        return [(d, *part) for d, part in parts.items()]

    def _batch(self, parts):
        """Each dataset is asked once: for its rows of the batch, or for samples of its own."""
        ids = dict(sorted((row, np.int16(d)) for d, rows, *_ in parts for row in rows))
        if self._is_plain:
            return {"dataset_id": np.array([*ids.values()]), **super()._batch(parts)}
        samples = {}
        for d, rows, wanted in parts:
            many = getattr(ds := self.datasets[d], "__getitems__", None)
            samples |= zip(rows, many(wanted) if many else [ds[k] for k in wanted])
        return [{"dataset_id": d, **samples[row]} for row, d in ids.items()]

def _drop_zeros(items, weights, names):
    """The items whose weights are not 0, and these weights, with a note that names the others."""
    if dropped := [str(name) for name, weight in zip(names, weights) if not weight]:
        log.warning("dropped from the blend, weight 0: %s", ", ".join(dropped))
    return [item for item, weight in zip(items, weights) if weight], [*filter(None, weights)]

# ==============================================================================
# 7. The builder
# ==============================================================================
# Question answered here: which datasets does a config mean, and who builds them first?
#
#   config: blend + split           every corpus is cut by the split matrix, then blended by split
#           blend_per_split         each split has corpora of its own, whole
#           neither                 mock data
#   rank 0: build, write the cache  ->  did it fail?  ->  others: load (or build)  ->  did one fail?
#   weights   each corpus is built for                          the blend has
#   given     ceil(ceil(size * w) * (1 + surplus)) samples      sum of ceil(size * w) samples
#   None      one epoch                                         min(size, all of them); all if None
#
# The build is deterministic, so a rank that sees no cache builds its own; nobody waits for a file.
# Within a run a corpus may be ahead of its share: the surplus is for that.  Where it does not
# suffice (upstream then fails), that corpus alone is built again for as many as are drawn.

class BlendedMegatronDatasetBuilder:
    """Build train, valid and test from a config.  Upstream: BlendedMegatronDatasetBuilder.

    cls               a MegatronDataset class, such as GPTDataset
    sizes             samples wanted of train, valid, test; None: one epoch
    is_built_on_rank  () -> bool; ranks where it is False get None three times

    >>> config = GPTDatasetConfig(1234, 4, blend=([toy_corpus(), toy_corpus()], [1, 3]), split="1",
    ...                           tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> builder = BlendedMegatronDatasetBuilder(GPTDataset, [4, 0, 0], lambda: True, config)
    >>> [(s["dataset_id"].item(), bytes(s["tokens"].tolist())) for s in builder.build()[0]]
    [(1, b'cccc'), (0, b'bbbc'), (1, b'bbbc'), (1, b'aaaa')]
    """
    def __init__(self, cls, sizes, is_built_on_rank, config):
        _require(len(sizes) == len(Split), f"sizes: wanted {len(Split)} entries, got {list(sizes)}")
        self.cls, self.sizes, self.config = cls, list(sizes), config
        self.is_built_on_rank = is_built_on_rank
        _require(not (config.multiple_validation_sets and config.full_validation)
                 or sizes[Split.valid.value] is None, "full_validation: valid's size must be None")

    def build(self):
        """-> [train, valid, test]: None, a dataset, or (multiple_validation_sets) a list of them.
        With torch.distributed every rank must call it.  A failure on any rank is raised on all."""
        if not _is_distributed():
            return self._build()
        _wire(None) == "cpu" and _together(bool, None)  # new_group() waits for who has ended
        # a group of our own: a build may outlast the job's timeout, and gloo sees a dead process
        group = torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(hours=24))
        try:
            wanted, first = _together(self.is_built_on_rank, group), _rank() == 0
            mine = _together(lambda: self._build() if first else None, group)
            others = _together(lambda: self._build() if wanted and not first else None, group)
        finally:
            torch.distributed.destroy_process_group(group)
        return (mine or others) if wanted else [None] * len(Split)

    def _build(self):
        if self.config.split_matrix:
            return self._blend(*(self.config.blend or ([None], None)), self.config.split_matrix)
        return [blend and self._build_split(split, *blend)
                for split, blend in zip(Split, self.config.blend_per_split)]

    def _build_split(self, split, prefixes, weights):
        """blend_per_split: the whole of its corpora belongs to this split; one is no blend."""
        matrix = [(0.0, 1.0) if other is split else None for other in Split]
        if split is Split.valid and self.config.multiple_validation_sets and len(prefixes) > 1:
            return [self._blend([prefix], None, matrix)[split.value] for prefix in prefixes]
        return self._blend(prefixes, weights if len(prefixes) > 1 else None, matrix)[split.value]

    def _blend(self, prefixes, weights, matrix):
        """-> for each split with a place in matrix, the blend of its parts of the corpora."""
        sizes, asked = self.sizes, itertools.repeat([None] * len(Split))
        if weights is None and len(prefixes) == 1:
            return self._cut(prefixes[0], matrix, sizes)
        if weights is not None:
            _require(None not in itertools.compress(sizes, matrix),
                     f"a blend with weights needs a size for each split, got {sizes}")
            prefixes, weights = _drop_zeros(prefixes, weights, prefixes)
            weights, surplus = normalize(weights), 1 + self.config.mid_level_dataset_surplus
            asked = [[math.ceil(math.ceil((n or 0) * w) * surplus) for n in sizes] for w in weights]
        with concurrent.futures.ThreadPoolExecutor(self.config.num_dataset_builder_threads) as pool:
            cut = list(pool.map(self._cut, prefixes, itertools.repeat(matrix), asked))
        return [bounds and self._blend_split(split, list(parts), weights, size)
                for split, bounds, size, *parts in zip(Split, matrix, sizes, *cut)]

    def _blend_split(self, split, datasets, weights, size):
        """The blend of one split; a corpus that it would exhaust is built again, larger."""
        if weights is not None:
            size = sum(math.ceil(size * weight) for weight in weights)
        else:
            weights = [len(dataset) for dataset in datasets]
            if size is not None and size > sum(weights):
                warnings.warn(f"{split.name}: an epoch has {sum(weights)} samples, not {size}: the "
                              "run will end early; give weights, to repeat corpora")
                size = sum(weights)
        try:
            return BlendedDataset(datasets, weights, size, self.config)
        except BlendTooLarge as error:
            for ds, count in error.needed.items():  # only these: num_samples can change the order
                datasets[datasets.index(ds)] = self.cls(
                    ds.dataset, ds.dataset_path, ds.indices, count, split, self.config)
        return BlendedDataset(datasets, weights, size, self.config)

    def _cut(self, prefix, matrix, sizes):
        """One corpus, opened once -> its part of each split that has a place in matrix."""
        raw = self.cls.build_low_level_dataset(prefix, self.config)
        n = self.cls.numel_low_level_dataset(raw)
        _require(n < 2**31, f"{prefix}: {n} sequences, int32 names {2**31 - 1}: split it")
        return [bounds and self.cls(raw, prefix, np.arange(*split_range(bounds, n), dtype=np.int32),
                                    size, split, self.config)
                for split, bounds, size in zip(Split, matrix, sizes)]

def _wait(call, *arguments, **how):
    """call(...), which waits for other ranks; RuntimeError that names the one whose process ended.
    Who finds its connection closed notes it in the store, for those who hear of it only later."""
    try:
        return call(*arguments, **how)
    except RuntimeError as error:
        closed, count = re.compile("by peer|Broken pipe").search, torch.distributed.get_world_size()
        if not closed(str(error)):
            raise
        time.sleep(1)  # so that all connections to it are closed, and to nobody else
        gone = ", ".join(str(rank) for rank in range(count) if closed(str(_attempt(
            lambda: torch.distributed.irecv(torch.empty(1), rank))[1])))  # does not wait
        store = torch.distributed.distributed_c10d._get_default_store()
        note, _ = _attempt(lambda: store.compare_set("megatron_min/gone", "", gone).decode() or "?")
        time.sleep(3 * (_rank() == 0))  # it may hold the store
        raise RuntimeError(f"rank {note or 0}: its process has ended: see its log") from error

def _wire(group):
    """The device whose tensors a group can send."""
    return "cuda" if _is_distributed() and torch.distributed.get_backend(group) == "nccl" else "cpu"

def _gather(value, group=None):
    """A JSON-able value of each rank, an int or 600 characters -> the list of all; no pickle."""
    text = json.dumps(value).encode().ljust(8192)  # 12 bytes for the widest of characters
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(_wire(group))
    everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    _wait(torch.distributed.all_gather, everyone, mine, group=group)
    return [json.loads(bytes(row.tolist())) for row in everyone]

def _attempt(step):
    """-> what step() returns, and the error that it raises instead."""
    try:
        return step(), None
    except Exception as error:
        return None, error

def _together(step, group):
    """Every rank calls step() -> its result, or all raise the error of one; 4 bytes if none has."""
    if not _is_distributed() or torch.distributed.get_world_size(group) == 1:
        return step()
    result, error = _attempt(step)
    failed = torch.tensor([error is not None], dtype=torch.int32, device=_wire(group))
    _wait(torch.distributed.all_reduce, failed, torch.distributed.ReduceOp.MAX, group=group)
    if failed.item():
        _raise_together(error, group)
    return result

def _raise_together(error, group):
    """Every rank calls it with its error or None, and raises that of the first rank with one."""
    for found in filter(None, _gather(error and _as_message(error), group)):
        _raise_message(found, error)

def _as_message(error):
    """What travels of an error: its class, and its unquoted sentence after the rank that met it."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)[:600]
    return type(error).__name__, re.sub(r"^(?!rank \d+: )", f"rank {_rank()}: ", text)

def _raise_message(message, cause=None):
    """Raise the error of a message, as its own class if that is one of these."""
    kinds = (DatasetFormatError, BlendTooLarge, ValueError, TypeError, KeyError, IndexError,
             ImportError, FileNotFoundError, PermissionError, OSError, StopIteration, RuntimeError)
    (name, text), kind = message, {kind.__name__: kind for kind in kinds}.get(message[0])
    raise kind(text) if kind else RuntimeError(text.replace(": ", f": {name}: ", 1)) from cause

# ==============================================================================
# 8. Samplers, loader, resume
# ==============================================================================
# Question answered here: which samples does rank r get at step t, and after a stop?
#
#   micro_batch_size 2, data_parallel_size 2       global batch 0     global batch 1
#   order of samples                               0  1  2  3         4  5  6  7
#   rank                                           0  0  1  1         0  0  1  1
#
# The order is global, and one number, consumed_samples, says how far it was used.  So a job may go
# on with other ranks, micro-batches or workers, wherever the order does not depend on them:
#
#   sampler                   order                                   may change on resume
#   single, full_validation   0, 1, 2, ...                            ranks, micro-batch, workers
#   cyclic, unsharded         a new shuffle of all, each epoch        ranks, workers; micro-batch if
#                                                                     as many samples are left out
#   cyclic, sharded           each rank shuffles a bucket of its own  workers; micro-batch if the
#                                                                     buckets stay the same

class _Sampler:
    """What the samplers share.  consumed_samples: where the next pass begins; kind: the name in a
    saved state; geometry(consumed): the order is the saved one if and only if it is equal, and
    ValueError unless a pass can begin there."""
    def __init__(self, total_samples, consumed_samples, micro_batch_size, data_parallel_rank,
                 data_parallel_size, drop_last=True):
        sizes, rank = (total_samples, micro_batch_size, data_parallel_size), data_parallel_rank
        _require(min(sizes) >= 1 and 0 <= rank < data_parallel_size, f"rank {rank}, total_samples, "
                 f"micro_batch_size, data_parallel_size {sizes}: wanted >= 1, rank below the last")
        self.total_samples, self.micro_batch_size, self.data_parallel_size = map(int, sizes)
        self.consumed_samples, self.data_parallel_rank = int(consumed_samples), data_parallel_rank
        self._group = self.micro_batch_size * self.data_parallel_size
        self.micro_batch_times_data_parallel_size, self.drop_last = self._group, drop_last
        self.active_total_samples = self.total_samples - self.total_samples % self._group
        self.geometry(consumed_samples)

class MegatronPretrainingSampler(_Sampler):
    """Samples in order, from consumed_samples on.  Upstream: MegatronPretrainingSampler.

    Yields lists of micro_batch_size indices, rank r the r-th part of each global batch.
    drop_last=False: the tail is shared out, None (padding) in the missing places, so that every
    rank yields as many.  A second pass starts at 0.  len() counts batches (upstream: samples).

    >>> list(MegatronPretrainingSampler(6, 0, 1, data_parallel_rank=1, data_parallel_size=2))
    [[1], [3], [5]]
    """
    kind = "single"

    def __len__(self):
        whole, rest = divmod(self.total_samples - self.consumed_samples, self._group)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self):
        firsts = range(self.consumed_samples, self.total_samples, self._group)[:len(self)]
        self.consumed_samples, rank, ranks = 0, self.data_parallel_rank, self.data_parallel_size
        for first in firsts:
            count = min(self._group, self.total_samples - first)  # a short one is shared out evenly
            mine = range(first - -rank * count // ranks, first - -(rank + 1) * count // ranks)
            yield [*mine] + [None] * (self.micro_batch_size - len(mine))

    def geometry(self, consumed_samples):
        """What must be equal for a run to go on exactly: nothing but the order itself.  At the
        very end begins an empty pass."""
        _require(0 <= consumed_samples <= self.total_samples,
                 f"consumed_samples is {consumed_samples} of {self.total_samples}")
        return {"consumed": consumed_samples}

class MegatronFullValidationSampler(MegatronPretrainingSampler):
    """One sample a rank a step, to the last, then None; micro_batch_size is not used."""
    kind = "full_validation"

    def __init__(self, total_samples, consumed_samples=0, micro_batch_size=1, data_parallel_rank=0,
                 data_parallel_size=1):
        super().__init__(total_samples, consumed_samples, 1, data_parallel_rank,
                         data_parallel_size, drop_last=False)

class MegatronPretrainingRandomSampler(_Sampler):
    """Samples in a new random order every epoch.  Upstream: MegatronPretrainingRandomSampler.

    data_sharding  True: each rank shuffles a part of its own; False: one order, dealt to the ranks
    seed           the order of epoch e comes from seed + e (upstream: from e)

    The last total_samples % (micro_batch_size * data_parallel_size) samples of each order are left
    out, so that all ranks stay in the same epoch (upstream: not if unsharded).  Each pass goes on
    at consumed_samples, which every batch advances; len() is what is left of the epoch, in batches.

    >>> list(MegatronPretrainingRandomSampler(None, 8, 0, 1, 0, 1, data_sharding=True))
    [[4], [0], [7], [3], [2], [5], [1], [6]]
    """
    kind = "cyclic"

    def __init__(self, dataset, total_samples, consumed_samples, micro_batch_size,
                 data_parallel_rank, data_parallel_size, data_sharding, seed=0):
        self.dataset, self.data_sharding, self.seed = dataset, data_sharding, int(seed)
        super().__init__(total_samples, consumed_samples, micro_batch_size, data_parallel_rank,
                         data_parallel_size)

    def __len__(self):
        done = self.consumed_samples % self.active_total_samples
        return (self.active_total_samples - done) // self._group

    def __iter__(self):
        now, rank = self.geometry(self.consumed_samples), self.data_parallel_rank
        generator = torch.Generator().manual_seed(now["seed"] + now["epoch"])
        parts = self.data_parallel_size if self.data_sharding else 1  # each has an order of its own
        order = torch.randperm(now["of"] // parts, generator=generator)
        rest = order[now["done"] // parts:self.active_total_samples // parts]
        order = rank * len(order) + rest if parts > 1 else rest[rank::self.data_parallel_size]
        for batch in order.split(self.micro_batch_size):
            self.consumed_samples += self._group
            yield batch.tolist()

    def geometry(self, consumed_samples):
        """What must be equal for a run to go on exactly; of: the samples that are shuffled.  A pass
        begins at a whole number of global batches."""
        whole = 0 <= consumed_samples < 2**63 and consumed_samples % self._group == 0
        _require(whole and self.active_total_samples, f"consumed_samples {consumed_samples} of "
                 f"{self.total_samples}: wanted whole global batches of {self._group}, at least 1")
        epoch, done = divmod(consumed_samples, self.active_total_samples)
        ranks = {"data_parallel_size": self.data_parallel_size} if self.data_sharding else {}
        unit = self._group if self.data_sharding else self.micro_batch_size
        return {"seed": self.seed, "data_sharding": self.data_sharding, "epoch": epoch,
                "done": done, "of": self.total_samples - self.total_samples % unit} | ranks

def fingerprint(dataset):
    """What a resumed run must find again, as a small dict; paths do not count, data does."""
    found = {"class": type(dataset).__name__, "num_samples": len(dataset)}
    if isinstance(dataset, BlendedDataset):
        parts = [fingerprint(part) for part in dataset.datasets]
        return {**parts[0], **found, "size": dataset.size, "weights": _md5(str(dataset.weights)),
                "data": _md5(json.dumps(parts))}
    if isinstance(dataset, MegatronDataset):
        found |= {"split": dataset.index_split.name, "requested": dataset.num_samples}
        found |= {key: getattr(dataset.config, key) for key in ("sequence_length", "random_seed")}
    if isinstance(dataset, GPTDataset):
        found["data"] = _md5(json.dumps(dataset.source()[0]))
    return found

class PretrainingDataLoader(torch.utils.data.DataLoader):
    """A DataLoader whose position can be saved, as with torchdata's StatefulDataLoader.

    The sampler runs ahead, for threads or worker processes; the state does not: a batch counts when
    it is handed over, so what was made ahead and not used is made again after a resume.
    """
    def __init__(self, dataset, batch_sampler, **arguments):
        # each worker sets _ships of its dataset to its number, see _CachedIndices.__getitems__
        ours = {"collate_fn": list, "worker_init_fn": functools.partial(setattr, dataset, "_ships")}
        self._is_ours = (getattr(dataset, "_is_plain", False) and ours.keys().isdisjoint(arguments)
                         and all(type(ds.dataset) is IndexedDataset for ds in dataset.sources))
        arguments |= ours if self._is_ours and arguments.get("num_workers") else {}
        super().__init__(dataset, batch_sampler=batch_sampler, **arguments)
        self.consumed_samples = batch_sampler.consumed_samples

    def __iter__(self):
        sampler, limit = self.batch_sampler, self.batch_sampler.total_samples
        if sampler.kind == "cyclic":  # endless; not from where prefetching left the sampler
            sampler.consumed_samples, limit = self.consumed_samples, math.inf
        start = sampler.consumed_samples
        if self._is_ours and not self.num_workers:  # made ahead by threads
            # two in Python would only wait for each other
            pool = concurrent.futures.ThreadPoolExecutor(2 if IMPLEMENTATION == "c" else 1)
            batches = _ahead(pool, 2, self._make, map(self.dataset._parts, sampler))
        else:  # made by torch, or of what a worker sent
            batches = map(self._make, super().__iter__()) if self._is_ours else super().__iter__()
        for number, batch in enumerate(batches, 1):
            self.consumed_samples = min(start + number * sampler._group, limit)
            yield batch

    def _make(self, parts):
        """A batch of one of our datasets, of what its _parts() said."""
        batch = {key: torch.from_numpy(row) for key, row in self.dataset._batch(parts).items()}
        return {key: row.pin_memory() for key, row in batch.items()} if self.pin_memory else batch

    def state_dict(self):
        """A small JSON-able dict, equal on all ranks: how far, in which order, of which data."""
        sampler, consumed = self.batch_sampler, self.consumed_samples
        return {"version": 1, "consumed_samples": consumed, "sampler": sampler.kind,
                "geometry": sampler.geometry(consumed), "dataset": fingerprint(self.dataset)}

    def load_state_dict(self, state, strict=True):
        """Go on where the state was taken.  Ranks, micro-batch size and workers may differ, unless
        the order depends on them.  ValueError names what does not fit (strict=False: go on)."""
        sampler, here = self.batch_sampler, {"sampler": self.batch_sampler.kind, "version": 1}
        try:
            consumed = operator.index(state["consumed_samples"])
            saved = state["dataset"] | state["geometry"] | {key: state[key] for key in here}
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no state of a PretrainingDataLoader: {error!r}") from None
        here |= fingerprint(self.dataset) | sampler.geometry(consumed)
        differ = [f"{key} is {here.get(key)!r} here, {saved.get(key)!r} in the state"
                  for key in sorted({*here, *saved}) if here.get(key) != saved.get(key)]
        _require(not differ or not strict, f"the state does not fit: {'; '.join(differ)}")
        self.consumed_samples = sampler.consumed_samples = consumed

def build_pretraining_data_loader(
        dataset, consumed_samples, *, micro_batch_size, data_parallel_rank=0, data_parallel_size=1,
        dataloader_type="single", data_sharding=True, num_workers=0, full_validation=False,
        drop_last=True, seed=0):
    """A PretrainingDataLoader of this rank's micro-batches, dicts of (micro_batch_size, ...); None
    for None.  Upstream: build_pretraining_data_loader.

    dataloader_type   "single": in order; "cyclic": shuffled anew each epoch; "external": dataset
                      is the user's own loader, and is returned as it is
    full_validation   every sample once, one a rank a step

    >>> loader = build_pretraining_data_loader(range(8), 0, micro_batch_size=2)
    >>> next(iter(loader)), loader.state_dict()["consumed_samples"]
    (tensor([0, 1]), 2)
    """
    if dataset is None or dataloader_type == "external":
        return dataset
    _require(dataloader_type in ("single", "cyclic"),
             f"dataloader_type must be single, cyclic or external, got {dataloader_type!r}")
    sizes = len(dataset), consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size
    sampler = (MegatronFullValidationSampler(*sizes) if full_validation else
               MegatronPretrainingSampler(*sizes, drop_last) if dataloader_type == "single" else
               MegatronPretrainingRandomSampler(dataset, *sizes, data_sharding, seed))
    how = {"pin_memory": torch.cuda.is_available(), "persistent_workers": num_workers > 0}
    return PretrainingDataLoader(dataset, sampler, num_workers=num_workers, **how)

def cyclic_iter(iterable):
    """Yield its items for ever, pass after pass.  One may be empty (a run resumed at the end of an
    epoch); two in a row are a ValueError instead of a hang.

    >>> list(itertools.islice(cyclic_iter([1, 2, 3]), 7))
    [1, 2, 3, 1, 2, 3, 1]
    """
    empty = 0
    while empty < 2:
        empty += 1
        for item in iterable:
            empty = 0
            yield item
    raise ValueError("nothing to iterate over: the loader yielded no batch in two passes")

class RerunDataIterator(collections.abc.Iterator):
    """An iterator whose last micro-batches can be had again.  Upstream: RerunDataIterator.

    rewind() goes back to the last advance(); advance() forgets what was read until now.

    >>> numbers = RerunDataIterator(range(9))
    >>> next(numbers), next(numbers), numbers.rewind(), next(numbers), next(numbers)
    (0, 1, None, 0, 1)
    """
    def __init__(self, iterable):
        self.iterable, self._source, self._read, self._again = iterable, iter(iterable), [], []

    def __next__(self):
        self._read.append(self._again.pop() if self._again else next(self._source))
        return self._read[-1]

    def rewind(self):
        """Yield again all that came since the last advance()."""
        self._read, self._again = [], self._again + self._read[::-1]

    def advance(self):
        """The step is done: what was read is not needed any more."""
        self._read = []

def get_train_valid_test_num_samples(*, global_batch_size, eval_interval, eval_iters,
                                     train_iters=None, train_samples=None, full_validation=False):
    """(train, valid, test) samples that a run of train_iters or train_samples needs; valid is None
    with full_validation.  Evaluations, of eval_iters global batches, come every eval_interval
    iterations and at the end; test is used once.  Upstream: get_train_valid_test_num_samples.

    >>> get_train_valid_test_num_samples(global_batch_size=8, train_iters=100, eval_interval=50,
    ...                                  eval_iters=2)
    (800, 48, 16)
    """
    _require((train_iters is None) != (train_samples is None),
             f"give train_iters or train_samples, got {train_iters} and {train_samples}")
    for size in (global_batch_size, eval_interval):
        _require(size >= 1, f"global_batch_size and eval_interval must be >= 1, got {size}")
    samples = train_samples if train_iters is None else train_iters * global_batch_size
    evaluations = samples // global_batch_size // eval_interval + 1
    valid = None if full_validation else evaluations * eval_iters * global_batch_size
    return samples, valid, eval_iters * global_batch_size

class NumMicroBatches:
    """Micro-batches a step, constant or ramped up.  Upstream: num_microbatches_calculator.

    global_batch_size  samples a step, over all data-parallel ranks
    rampup_batch_size  (start, increment, samples): the global batch grows from start to
                       global_batch_size in equal steps of increment over so many samples
    Raises             ValueError if one of these is no whole number of micro-batches on every rank

    >>> ramp = NumMicroBatches(32, 4, 2, rampup_batch_size=(16, 8, 100))
    >>> [(ramp.update(consumed), ramp.get(), ramp.get_current_global_batch_size())[1:]
    ...  for consumed in (0, 50, 101)]
    [(2, 16), (3, 24), (4, 32)]
    """
    def __init__(self, global_batch_size, micro_batch_size, data_parallel_size,
                 rampup_batch_size=None):
        self.global_batch_size, self.unit = global_batch_size, micro_batch_size * data_parallel_size
        ramp = rampup_batch_size or (global_batch_size, 1, 0)
        _require(len(ramp) == 3, f"rampup_batch_size is (start, increment, samples), got {ramp}")
        start, increment, self.samples = ramp
        self.sizes = range(start, global_batch_size + 1, max(1, increment))
        good = min(start, increment) >= 1 and self.samples >= 0 and global_batch_size in self.sizes
        _require(good, f"ramp-up {ramp}: wanted whole steps from >= 1 to {global_batch_size}")
        bad = [size for size in self.sizes if self.unit < 1 or size % self.unit]
        _require(not bad, f"global batch {bad[:1]}: no multiple of micro-batch*ranks, {self.unit}")
        self.update(0)

    def update(self, consumed_samples):
        """Set the batch size of the step that begins after so many samples."""
        steps, samples = len(self.sizes) - 1, self.samples
        ramping = steps and samples and consumed_samples <= samples
        self._current = self.sizes[int(consumed_samples / (samples / steps)) if ramping else -1]

    def get(self):
        """Micro-batches of the current step."""
        return self._current // self.unit

    def get_current_global_batch_size(self):
        """Samples of the current step."""
        return self._current

def check_data_consistency(consumed_samples, group=None):
    """ValueError on every rank if the ranks of group do not agree on consumed_samples."""
    found = _gather(int(consumed_samples), group) if _is_distributed() else []
    _require(len({*found}) <= 1, f"the ranks disagree on consumed_samples, {found}: load one state")

# ==============================================================================
# 9. Parallel batches
# ==============================================================================
# Question answered here: which part of a batch does each rank get, and how does it come there?
#
#   tp=2 cp=2 dp=2 pp=2: rank = tp + 2 cp + 4 dp + 8 pp, so tp neighbours are neighbours
#
#   a global batch  --sampler-->  dp 0: ranks 0-3, 8-11       dp 1: ranks 4-7, 12-15
#   of one dp rank  --stage--->   pp 0: tokens, positions     pp 1: labels, loss mask
#   of one stage    --read---->   tp 0 reads it  --one broadcast, 4 bytes a token-->  tp 1
#   all of them     --zigzag-->   cp 0: chunks 0 and 3 of 0 1 2 3          cp 1: chunks 1 and 2
#
# (Under causal attention the last chunk costs most, the first least: each pair costs the same.)
# An int32 a token is sent, from which receivers derive the rest; upstream broadcasts five tensors,
# 28 bytes a token without a mask: 8 tokens, 8 labels, 8 positions, 4 loss mask.
#
#   bit 31  30         29        28         27 .. 0
#       0   document   position  has loss   id; the labels are the ids one further on, so a row has
#           starts     restarts             S + 1 of them
#
# A batch that does not come back equal (other labels, weights in the loss mask, ids from 2**28 up,
# a mask of its own) follows whole, tensor by tensor.

_BATCH_KEYS = "tokens", "labels", "loss_mask", "attention_mask", "position_ids"
_LOSS, _RESTART, _BOUNDARY = (1 << bit for bit in (28, 29, 30))
_PACKED, _WHOLE, _FAILED = range(3)  # what a message is
_POSTED = "megatron_min/error"  # the store's key for it: stages run at their own pace

class ParallelGroups:
    """The layout of a job: tensor x context x pipeline ranks, and data, what is left of the world.

    A kind is an axis, tp, cp, dp or pp, or several joined by "-"; the ranks of a group differ in
    these alone.  Without torch.distributed: one process.  Upstream: RankGenerator, tp-cp-ep-dp-pp.

    >>> ParallelGroups.rank_lists("cp", tensor=2, context=2), ParallelGroups().size("dp-cp")
    ([[0, 2], [1, 3]], 1)
    """
    # those with a process group; rank(), size() and rank_lists() know every combination
    _KINDS = "tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp-pp"

    @staticmethod
    def rank_lists(kind, *, tensor=1, context=1, data=1, pipeline=1):
        """All groups of a kind, as lists of ranks; pure."""
        sizes, axes = {"pp": pipeline, "dp": data, "cp": context, "tp": tensor}, kind.split("-")
        _require({*axes} <= {*sizes}, f"kind {kind!r}: wanted tp, cp, dp, pp, or some joined by -")
        _require(min(sizes.values()) >= 1, f"sizes must be >= 1, got {sizes}")
        ranks = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        order = np.argsort([name in axes for name in sizes], kind="stable")  # those of kind last
        return ranks.transpose(order).reshape(-1, math.prod(sizes[a] for a in {*axes})).tolist()

    def __init__(self, *, tensor=1, context=1, pipeline=1):
        world = torch.distributed.get_world_size() if _is_distributed() else 1
        model = tensor * context * pipeline
        _require(min(tensor, context, pipeline) >= 1 and world % model == 0, f"{world} ranks "
                 f"cannot be cut into tensor {tensor} x context {context} x pipeline {pipeline}")
        self.sizes = dict(tensor=tensor, context=context, data=world // model, pipeline=pipeline)
        self._ranks, alive = functools.cache(self._ranks), _is_distributed()  # for each micro-batch
        self._groups = {kind: self._new_group(kind) if alive else None for kind in self._KINDS}
        self._gloo = self._groups  # batches travel between CPUs, so that no GPU has to wait
        if alive and torch.distributed.get_backend() != "gloo":
            self._gloo = {kind: self._new_group(kind, "gloo") for kind in ("tp", "dp-cp")}

    def _new_group(self, kind, backend=None):
        """Every rank makes all groups of a kind -> the one this rank is in."""
        lists = self.rank_lists(kind, **self.sizes)
        return torch.distributed.new_subgroups_by_enumeration(lists, backend=backend)[0]

    def _ranks(self, kind):
        """The ranks of this rank's group."""
        return next(r for r in self.rank_lists(kind, **self.sizes) if _rank() in r)

    def rank(self, kind):
        """This rank's place in its group of a kind."""
        return self._ranks(kind).index(_rank())

    def size(self, kind):
        """Ranks in a group of a kind."""
        return len(self._ranks(kind))

    def group(self, kind):
        """The process group of one of the kinds above; None without torch.distributed."""
        _require(kind in self._groups, f"no group {kind!r}: there are {', '.join(self._groups)}")
        return self._groups[kind]
    is_first_stage = property(lambda self: self.rank("pp") == 0, doc="has the embedding")
    is_last_stage = property(lambda self: self.rank("pp") + 1 == self.size("pp"), doc="has a loss")

def get_batch_on_this_tp_rank(data_iterator, groups, *, micro_batch_size, sequence_length,
                              create_attention_mask=False, mtp=False, device=None):
    """The next micro-batch on every tensor-parallel rank; only tp rank 0 reads it.

    data_iterator          yields a loader's batches; None will do on other ranks
    create_attention_mask  also the dense mask; causal where the batch has none
    mtp                    the last stage also needs tokens and position_ids
    device                 where to put it; default: this rank's GPU with nccl, else the CPU
    Returns                tokens, labels, position_ids int64, loss_mask float32, (B, S), and
                           attention_mask bool (B, 1, S, S); None for what the pipeline stage does
                           not need: the first takes tokens and position_ids, the last labels and
                           loss_mask, others nothing; cu_seqlens, max_seqlen if the batch has them
    Raises                 what a reader met, on every rank of the stage at once, and on the other
                           stages at their next call; StopIteration when one has no more
    Cost                   one broadcast of 4 bytes a token (upstream: five, 28), over gloo; readers
                           first agree over dp-cp, with 4 bytes, that all of them have a batch
    """
    first, last = groups.is_first_stage, groups.is_last_stage
    needed, shape = first or last, (micro_batch_size, sequence_length)
    store_of = torch.distributed.distributed_c10d._get_process_group_store
    board = None if first and last else store_of(groups.group("pp"))

    def read():  # after a look at what another pipeline stage has met
        if board and board.check([_POSTED]):
            _raise_message(json.loads(board.get(_POSTED)))
        return _fitting(next(data_iterator), shape, create_attention_mask) if needed else {}
    try:
        batch = _broadcast(read, shape, groups, device) if needed else read()
    except Exception as failure:
        if board and not isinstance(failure, StopIteration):
            board.set(_POSTED, json.dumps(_as_message(failure)))
        raise
    drop = ["labels", "loss_mask"] * (not last) + ["tokens", "position_ids"] * (not (first or mtp))
    return dict.fromkeys(_BATCH_KEYS) | batch | dict.fromkeys(drop)

def _fitting(batch, shape, with_mask):
    """What is sent of a batch; ValueError if it is not of the shape that all ranks expect."""
    kept, packed = {}, batch.get("cu_seqlens") is not None or batch.get("max_seqlen") is not None
    for key, (size, dtype) in _layout(*shape, with_mask, packed).items():
        if (value := batch.get(key)) is None and key == "attention_mask":
            value = _dense_mask(batch["position_ids"] == 0 if packed else torch.zeros(shape))
        found = getattr(value, "shape", None)
        _require(found == size, f"batch[{key!r}]: wanted shape {size}, got {found and (*found,)}: "
                 "give loader and get_batch the same micro_batch_size and sequence_length")
        kept[key] = value.to("cpu", getattr(torch, dtype))
    return kept

def _dense_mask(boundary):
    """bool (B, 1, S, S), True = may not attend: the future, and what lies before a boundary."""
    document = boundary.cumsum(1)
    future = torch.ones(2 * boundary.shape[1:], dtype=torch.bool, device=boundary.device).triu(1)
    return future | (document[:, None, :, None] != document[:, None, None, :])

def _pack(batch):
    """A batch -> int32: what it is, has a mask, has cu_seqlens, and the words of all its rows."""
    masked, packed = "attention_mask" in batch, "cu_seqlens" in batch
    words = torch.cat([batch["tokens"], batch["labels"][:, -1:]], 1).to(torch.int32)
    words[:, :-1] |= (batch["loss_mask"] != 0) * _LOSS | (batch["position_ids"] == 0) * _RESTART
    if masked:  # a row that may not attend to its neighbour starts a document
        words[:, 1:-1] |= batch["attention_mask"][:, 0].diagonal(-1, 1, 2) * _BOUNDARY
    return torch.cat([torch.tensor([_PACKED, masked, packed], dtype=torch.int32), words.flatten()])

def _unpack(message, shape, device):
    """The batch that _pack packed, on the device."""
    _, masked, packed = message[:3].tolist()
    words = message[3:].view(shape[0], shape[1] + 1)
    words = (words.pin_memory() if device.type == "cuda" else words).to(device, non_blocking=True)
    ids, flags = (words & (_LOSS - 1)).to(torch.int64), words[:, :-1]
    restarts, places = flags & _RESTART != 0, torch.arange(shape[1], device=device)
    batch = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous(),
             "loss_mask": (flags & _LOSS != 0).to(torch.float32),
             "position_ids": places - (restarts * places).cummax(1).values}
    if masked:
        batch["attention_mask"] = _dense_mask(flags & _BOUNDARY != 0)
    if packed:  # the restarts, in order; then S
        ends = torch.where(restarts, places, shape[1]).sort(1).values
        ends = torch.nn.functional.pad(ends, (0, 1), value=shape[1]).to(torch.int32)
        batch |= {"cu_seqlens": ends, "max_seqlen": ends.diff().amax(1)}
    return batch

def _broadcast(read, shape, groups, device):
    """What tp rank 0 reads, or its error, on every rank of its tp group."""
    device = torch.device(_wire(None) if device is None else device)
    step, tp = functools.partial(_together, read, groups._gloo["dp-cp"]), groups._gloo["tp"]
    if groups.size("tp") == 1:
        return {key: value.to(device, non_blocking=True) for key, value in step().items()}
    batch, error = (None, None) if groups.rank("tp") else _attempt(step)
    message = torch.full((3 + shape[0] * (shape[1] + 1),), _FAILED, dtype=torch.int32)
    if batch:
        message = _pack(batch)
        again = _unpack(message, shape, torch.device("cpu"))
        message[0] = _PACKED if all(torch.equal(again[k], batch[k]) for k in batch) else _WHOLE
    send = functools.partial(_wait, torch.distributed.broadcast, group=tp, group_src=0)
    send(message)
    kind, masked, packed = message[:3].tolist()
    if kind == _FAILED:
        _raise_together(error, tp)
    if kind == _PACKED:
        return again if batch and device.type == "cpu" else _unpack(message, shape, device)
    found = {key: batch[key].contiguous() if batch else torch.from_numpy(np.empty(size, dtype))
             for key, (size, dtype) in _layout(*shape, masked, packed).items()}
    return {key: (send(value), value.to(device))[1] for key, value in found.items()}

def get_batch_on_this_cp_rank(batch, cp_rank, cp_size):
    """This context-parallel rank's part of a batch: chunks r and 2*cp-1-r of 2*cp, in that order.

    batch    dict; tensors with a sequence axis (dim 1, of attention_mask dim 2) are cut, with
             cu_seqlens (B, S+1) inside every document; everything else (None, dataset_id,
             cu_seqlens, max_seqlen) passes through
    Returns  a new dict, sequences of S / cp_size; batch is not changed
    Raises   ValueError where S, or the length of a document, is no multiple of 2*cp_size

    >>> batch = {"tokens": torch.arange(8)[None]}
    >>> [get_batch_on_this_cp_rank(batch, rank, 2)["tokens"].tolist() for rank in (0, 1)]
    [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    >>> batch["cu_seqlens"] = torch.tensor([[0, 4, 8, 8, 8, 8, 8, 8, 8]])       # two documents
    >>> [get_batch_on_this_cp_rank(batch, rank, 2)["tokens"].tolist() for rank in (0, 1)]
    [[[0, 3, 4, 7]], [[1, 2, 5, 6]]]
    """
    _require(0 <= cp_rank < cp_size, f"cp_rank must be 0 .. {cp_size - 1}, got {cp_rank}")
    lengths = [batch[key].shape[1:][-1] for key in _BATCH_KEYS if batch.get(key) is not None]
    if cp_size == 1 or not lengths:
        return dict(batch)
    found, parts, ends = dict(batch), [], batch.get("cu_seqlens")
    for row, places in enumerate([[]] if ends is None else ends.tolist()):
        parts.append([])  # (begin, length) of this rank's chunks: of a row, or of all alike
        for d, (begin, end) in enumerate(itertools.pairwise(sorted({0, lengths[0], *places}))):
            chunk, rest = divmod(end - begin, 2 * cp_size)
            _require(not rest, f"document {d} of row {row} has {end - begin} tokens ({begin} to "
                     f"{end}): cp_size {cp_size} wants a multiple of {2 * cp_size}")
            parts[-1] += (begin + cp_rank * chunk, chunk), (end - (cp_rank + 1) * chunk, chunk)
    for key in batch.keys() - {"dataset_id", "cu_seqlens", "max_seqlen"}:
        value, dim = batch[key], 2 if key == "attention_mask" else 1
        if getattr(value, "shape", ())[dim:dim + 1] == (lengths[0],):  # else it has no such axis
            rows = [torch.cat([part.narrow(dim, *span) for span in spans], dim)
                    for part, spans in zip(value.chunk(len(parts)), parts)]
            found[key] = torch.cat(rows) if len(rows) > 1 else rows[0]
    return found

def get_batch(data_iterator, groups, **same):
    """get_batch_on_this_tp_rank with the same arguments, then get_batch_on_this_cp_rank."""
    def read():  # all ranks must hear of a batch that cannot be cut
        get_batch_on_this_cp_rank(_fitting(batch := next(data_iterator), shape, False), *place)
        return batch
    shape = same["micro_batch_size"], same["sequence_length"]
    place = groups.rank("cp"), groups.size("cp")
    return get_batch_on_this_cp_rank(
        get_batch_on_this_tp_rank(iter(read, None), groups, **same), *place)

# ==============================================================================
# 10. Gradients
# ==============================================================================
# Question answered here: how do the data-parallel ranks come to have the same gradients?
#
#   parameters, as the model uses them     embed   w1   w2   w3   head
#   buffer, one a dtype: in reverse,     | head | w3   w2 | w1   embed |   p.grad is a view of it
#   as backward makes the gradients      | bucket 0 | bucket 1  | bucket 2 |
#   backward: head's gradient arrives      sent -->
#             w3's, w2's                             sent -->
#             w1's, embed's                                       sent -->
#   finish_grad_sync()                     waits for all
#
# A bucket is sent when its last gradient is there and those before it are sent: so all ranks send
# in the same order, whatever parameters their batches use; one without a gradient is sent as zeros,
# at the end.  A tied parameter is one parameter, in the place of its first use.

class DistributedDataParallel(torch.nn.Module):
    """A model whose gradients are averaged over a group.  Upstream: DistributedDataParallel.

    module                     its parameters get main_grad and grad, views of one buffer a dtype
    group                      the ranks to average over; default all
    bucket_size                elements that are sent at once, at least
    overlap_grad_reduce        send each bucket during backward; False: all at the end
    use_distributed_optimizer  reduce-scatter: only this rank's piece of each bucket, grad_shards,
                               becomes the average; else all-reduce
    average_in_collective      the collective averages; else gradients are scaled by 1/dp before it
    check_for_nan_in_grad      finish_grad_sync() raises on every rank, naming parameter and rank
    """
    def __init__(self, module, group=None, *, bucket_size=40_000_000, overlap_grad_reduce=False,
                 use_distributed_optimizer=False, average_in_collective=False,
                 check_for_nan_in_grad=False):
        super().__init__()
        self.module, self.group, self.check_for_nan_in_grad = module, group, check_for_nan_in_grad
        self.overlap_grad_reduce, self._in_sync = overlap_grad_reduce, True
        self.size = torch.distributed.get_world_size(group) if _is_distributed() else 1
        self.use_distributed_optimizer = use_distributed_optimizer
        self.average_in_collective = average_in_collective
        self.grad_buffers, self._buckets, self._bucket_of, self._sent = [], [], {}, []
        self._names = {param: name for name, param in module.named_parameters()}
        kinds, weak = collections.defaultdict(lambda: [[]]), weakref.WeakMethod(self._on_gradient)
        for param in reversed([param for param in self._names if param.requires_grad]):
            runs = kinds[param.dtype, param.device]  # the parameters of each bucket of a buffer
            if sum(map(torch.numel, runs[-1])) >= bucket_size:
                runs.append([])
            runs[-1].append(param)
            param.register_post_accumulate_grad_hook(lambda p: weak() and weak()(p))  # no leak
        for (dtype, device), runs in kinds.items():
            sizes = [-(-sum(map(torch.numel, run)) // self.size) * self.size for run in runs]
            self.grad_buffers.append(torch.zeros(sum(sizes), dtype=dtype, device=device))
            self._buckets += zip(runs, self.grad_buffers[-1].split(sizes))
        for bucket, (params, data) in enumerate(self._buckets):
            for param, end in zip(params, itertools.accumulate(map(torch.numel, params))):
                param.main_grad = data[end - param.numel():end].view(param.shape)
                self._bucket_of[param] = bucket
        self.grad_shards = [data.chunk(self.size)[_rank(group)] for _, data in self._buckets]
        self.zero_grad_buffer()

    def forward(self, *inputs, **kwargs):
        """That of the module."""
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self):
        """Gradients of backwards inside are only added up: for all micro-batches but the last."""
        before, self._in_sync = self._in_sync, False
        try:
            yield
        finally:
            self._in_sync = before

    def _on_gradient(self, param):
        """Called when backward has added to param.grad."""
        bucket = self._bucket_of[param]
        _require(bucket >= len(self._sent), f"gradient of {self._names[param]} after it was sent: "
                 "put all backwards of a step but the last under no_sync()", RuntimeError)
        if param.grad is not param.main_grad:  # someone set it to None, which means zero
            param.grad = param.main_grad.copy_(param.grad)
        self._changed = True
        if self._in_sync and self.overlap_grad_reduce:
            self._waiting[bucket].discard(param)
            while len(self._sent) < len(self._buckets) and not self._waiting[len(self._sent)]:
                self._send(*self._buckets[len(self._sent)])

    def _send(self, params, data):
        """Start the collective of the next bucket."""
        for param in params:
            if param.grad is None:
                param.grad = param.main_grad.zero_()
            if self.check_for_nan_in_grad and param.main_grad.isnan().any():
                self._nans.append(self._names[param])
        self._sent.append(None)
        if self.size == 1:
            return
        how = {"op": torch.distributed.ReduceOp.AVG, "group": self.group, "async_op": True}
        if not self.average_in_collective:
            how["op"] = torch.distributed.ReduceOp.SUM
            data.mul_(1 / self.size)
        if self.use_distributed_optimizer:
            new = getattr(torch.distributed, "reduce_scatter_single", None)  # its later name
            scatter = new or torch.distributed.reduce_scatter_tensor
            self._sent[-1] = _wait(scatter, self.grad_shards[len(self._sent) - 1], data, **how)
        else:
            self._sent[-1] = _wait(torch.distributed.all_reduce, data, **how)

    def start_grad_sync(self):
        """Send the buckets that were not sent during backward."""
        for params, data in self._buckets[len(self._sent):] if self._changed else ():
            self._send(params, data)

    def finish_grad_sync(self):
        """Send what is left, wait for all; nothing is sent where no gradient has changed since."""
        self.start_grad_sync()
        found = self._nans
        self._begin(changed=False)
        if self.check_for_nan_in_grad:
            _together(lambda: _require(not found, f"nan in the gradient of {found[:1]}, and of "
                                       f"{len(found) - 1} others"), self.group)

    def _begin(self, changed):
        """Wait for what was sent: all gradients are to come again."""
        for handle in filter(None, self._sent):
            _wait(handle.wait)
        self._sent, self._nans, self._changed = [], [], changed
        self._waiting = [set(params) for params, _ in self._buckets]

    def zero_grad_buffer(self):
        """Before each step: all gradients 0, and param.grad views of the buffers again; a rank
        whose batch gives no gradient at all then sends zeros, and nobody waits for it."""
        self._begin(changed=True)
        for param in self._bucket_of:  # what lies between them stays 0
            param.grad = param.main_grad.zero_()

    def scale_gradients(self, factor):
        """Multiply all gradients."""
        for data in self.grad_buffers:
            data.mul_(factor)

    def broadcast_params(self):
        """Give every rank the parameters of the group's first."""
        for param in self._names if self.size > 1 else ():
            _wait(torch.distributed.broadcast, param.data, group=self.group, group_src=0)

def finalize_model_grads(model, num_tokens=None, groups=None):
    """Finish the gradients of a step.  Upstream: finalize_model_grads.

    model       list of DistributedDataParallel
    num_tokens  of this rank, int or tensor: gradients, of sums over tokens, become those of the
                mean over all ranks' tokens (the 1/dp of each model is undone); all ranks must give
                the same type
    groups      ParallelGroups, whose dp-cp ranks' tokens are added; default the model's group
    """
    for part in model:
        part.finish_grad_sync()
        if num_tokens is not None:
            total = torch.as_tensor(num_tokens, device=_wire(part.group)).clone()
            if part.size > 1:
                group = groups.group("dp-cp") if groups else part.group
                _wait(torch.distributed.all_reduce, total, group=group)
            part.scale_gradients(part.size / (total.item() or 1))

def forward_backward_no_pipelining(*, forward_step_func, data_iterator, model, num_microbatches,
                                   forward_only=False):
    """Run a step's micro-batches, finish the gradients -> reports.  Upstream: the same name.

    forward_step_func  (data_iterator, model) -> output, loss_func; loss_func(output) -> loss,
                       report, for gradients of the mean over micro-batches; or, for those of the
                       mean over all ranks' tokens: sum over tokens, num_tokens, report
    model              DistributedDataParallel, or a list of one, or a plain module
    forward_only       no backward; nothing is sent

    >>> model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    >>> step = lambda data, model: (model(next(data)), lambda y: (y.sum(), y.shape[0], len(y)))
    >>> batches = iter([torch.ones(3, 1), torch.zeros(1, 1)])
    >>> forward_backward_no_pipelining(forward_step_func=step, data_iterator=batches, model=model,
    ...                                num_microbatches=2), model.module.weight.grad.item()
    ([3, 1], 0.75)
    """
    parts, total, reports = model if isinstance(model, (list, tuple)) else [model], 0, []
    _require(len(parts) == 1 <= num_microbatches, f"wanted one model and at least one micro-batch, "
             f"got {len(parts)} and {num_microbatches}")
    model, is_ddp = parts[0], isinstance(parts[0], DistributedDataParallel)
    for left in reversed(range(num_microbatches)):
        with model.no_sync() if left and is_ddp else contextlib.nullcontext():
            output, loss_func = forward_step_func(data_iterator, model)
            loss, *tokens, report = loss_func(output)
            total = sum(tokens, total)
            if not forward_only:
                (loss if tokens else loss / num_microbatches).backward()
        reports.append(report)
    if is_ddp and not forward_only:
        finalize_model_grads([model], total if tokens else None)
    elif tokens and not forward_only:
        for param in (param for param in model.parameters() if param.grad is not None):
            param.grad /= total or 1
    return reports

# ==============================================================================
# 11. The command line
# ==============================================================================
# Question answered here: how is all this run from a shell?
#
#   megatron-min preprocess --input 'books/*.jsonl' --output-prefix books --append-eod --workers 8
#   megatron-min merge      --input books_text_document wiki_text_document --output-prefix all
#   megatron-min inspect    all --tokenizer tokenizer.json
#   megatron-min verify     all
#   megatron-min build      --blend 70 books 30 wiki --split 98,1,1 --sizes 1000000 1000 1000
#                           --sequence-length 2048 --random-seed 1234 --path-to-cache cache
#   megatron-min demo
#
# A function _command_NAME is the command NAME; its signature and its docstring make its flags:
#
#   def _command_name(prefix,       PREFIX                       A type is the annotation's, else
#       *, output_prefix,           --output-prefix, required    the default's, else str; one that
#       tokens=16,                  --tokens TOKENS              no shell can write has no flag.
#       append_eod=False,           --append-eod                 The help is the docstring's line
#       input: list[str],           --input INPUT [INPUT ...]    that begins with the name, else
#       **options: preprocess)      what preprocess takes        that of _add_arguments.

def _command_preprocess(*, tokenizer="bytes", eod_token=None, verbose=True, **options: preprocess):
    """JSONL, plain or gzip, to .bin/.idx pairs"""
    made = preprocess(tokenizer=build_tokenizer(tokenizer, eod_token), verbose=verbose, **options)
    return [_print_counts(prefix).path_prefix for prefix in made.values()]

def _print_counts(prefix, label="", check=None):
    """One line about a pair, which is opened and returned."""
    ds = IndexedDataset(prefix, check=check)
    print(f"{label}{prefix}: {len(ds):,} sequences, {len(ds.document_indices) - 1:,} documents, "
          f"{ds.num_tokens:,} tokens of {np.dtype(ds.dtype)}")
    return ds

def _command_merge(*, input: list[str], output_prefix, multimodal=False):
    """append pairs into a new pair"""
    merge(input, output_prefix, multimodal)
    _print_counts(output_prefix)

def _command_inspect(prefix, *, tokens=16, tokenizer="bytes", eod_token=None):
    """header, counts, lengths and first tokens of a pair"""
    decoder, ds = build_tokenizer(tokenizer, eod_token), _print_counts(prefix, check=False)
    if len(ds):
        lengths = ds.sequence_lengths[::-(-len(ds) // 1000)]  # no need to read a billion
        marks = np.percentile(lengths, (0, 1, 25, 50, 75, 99, 100)).round().astype(int).tolist()
        print(f"min, 1%, 25%, median, 75%, 99%, max of {len(lengths):,} lengths: {marks}")
        print("sequence 0:", first := ds[0][:max(0, tokens)].tolist())
        with contextlib.suppress(Exception):  # ids of another tokenizer, most often
            print(f"decoded:    {decoder.detokenize(first)!r}")

def _command_verify(prefix: list[str], *, write=False):
    """check the whole .idx, that the .bin fits, and every byte, if there is a .sum

    write   make the .sum, CRC-32 of each MiB, where there is none
    """
    for path in prefix:
        if summed := os.path.exists(f"{path}.sum"):
            IndexedDataset(path).verify_bin()
        elif write:
            write_checksums(path)
        _print_counts(path, "every byte as noted: " if summed else "whole: ", check=True)

def _command_build(*, sizes: list[str], blend: list[str] = None, train_blend: list[str] = None,
                   valid_blend: list[str] = None, test_blend: list[str] = None,
                   tokenizer="bytes", eod_token=None, **fields: GPTDatasetConfig):
    """make the index caches of a blend, for jobs whose tokenizer has the same unique_identifiers

    sizes         samples of train, valid and test; none: one epoch
    blend         prefixes, or a weight before each: 70 books 30 wiki
    train_blend   whole corpora for train, where blend and split are not given
    valid_blend   the same for valid
    test_blend    the same for test
    """
    _require(all(size == "none" or size.isdecimal() for size in sizes),
             f"--sizes: wanted numbers of samples, or none (one epoch), got {' '.join(sizes)}")
    sizes = [None if size == "none" else int(size) for size in sizes]
    blend, *per_split = map(get_blend_from_list, (blend, train_blend, valid_blend, test_blend))
    config = GPTDatasetConfig(blend=blend, blend_per_split=per_split,
                              tokenizer=build_tokenizer(tokenizer, eod_token), **fields)
    built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    for split, found in zip(Split, built):
        for ds in found if isinstance(found, list) else [found]:
            print(f"{split.name}: " + ("none" if ds is None else f"{len(ds):,} samples of "
                  f"{config.sequence_length} tokens, {ds.unique_description_hash}"))

def _command_demo(*, keep=None):
    """real text to blended, resumable batches, in a few seconds"""
    with contextlib.nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        os.makedirs(folder, exist_ok=True)
        modules = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
        code = [path.read_text("utf-8", "replace") for path in modules[:150]]
        docs = ["".join(re.findall('"""(.+?)"""', text, re.DOTALL)) for text in code]
        rows = [json.dumps({"code": text, "docs": strings}) for text, strings in zip(code, docs)]
        pathlib.Path(folder, "demo.jsonl").write_text("\n".join(rows))
        print("1. Text to pairs: Python's modules and docstrings; a token is a byte, or an end")
        pairs = _command_preprocess(input=f"{folder}/demo.jsonl", output_prefix=f"{folder}/demo",
                                    json_keys=["code", "docs"], append_eod=True, verbose=False)
        config = GPTDatasetConfig(1234, 256, (pairs, [70, 30]), split="90,5,5",
                                  tokenizer=ByteTokenizer(), create_attention_mask=False)
        train, *_ = BlendedMegatronDatasetBuilder(GPTDataset, [600]*3, lambda: True, config).build()
        print(f"2. A blend, 70 % code: {len(train)} samples of 256 tokens; 90 % of each pair hold")
        for part, taken in zip(train.datasets, np.bincount(train.dataset_index)):
            print(f"   ({part.tokens_per_epoch()} - 1) // 256 = {len(part)} samples, {taken} taken")
        two, four = ([build_pretraining_data_loader(
            train, 0, micro_batch_size=8 // ranks, data_parallel_rank=rank,
            data_parallel_size=ranks) for rank in range(ranks)] for ranks in (2, 4))
        steps = zip(*two)
        text = ByteTokenizer().detokenize([next(steps) for _ in range(5)][0][0]["tokens"][0])
        print(f"3. Batches: 2 ranks x 4 samples, first {text[:32]!r}, stopped after 5 steps")
        for loader in four:
            loader.load_state_dict(two[0].state_dict())
        equal = [torch.equal(*(torch.cat([part["tokens"] for part in step]) for step in both))
                 for both in zip(steps, zip(*four), strict=True)]
        print(f"4. Resumed: 4 ranks x 2 samples, {len(equal)} more steps, equal: {all(equal)}")

def _add_arguments(parser, source, named=()):
    """The parameters of a function or class, as in the table above; named: those of its caller.

    prefix          path of a pair without .bin and .idx
    input           prefixes of pairs of one dtype, in their order
    output_prefix   of the new pair, or the beginning of its name
    multimodal      the pairs hold modes
    tokens          how many tokens of sequence 0 to show, and to decode
    keep            a folder to work in, whose files stay
    tokenizer       bytes, null:VOCAB, a tokenizer.json or module:attribute
    eod_token       text of a tokenizer.json's end-of-document token
    verbose         show docs/s, MB/s and the time left on stderr
    """
    words = {bool: {"action": argparse.BooleanOptionalAction}, int: {"type": int}, str: {},
             float: {"type": float}, list[str]: {"nargs": "+"}, type(None): {}, type: {}}
    text = "\n".join(map(inspect.getdoc, (*getattr(source, "__mro__", [source]), _add_arguments)))
    for name, parameter in inspect.signature(source).parameters.items():
        kind, default = parameter.annotation, parameter.default
        if parameter.kind is parameter.VAR_KEYWORD:
            _add_arguments(parser, kind, inspect.signature(source).parameters)
        kind = type(default) if kind is parameter.empty else kind  # type, if it has no default
        kind = kind.__args__[0] if isinstance(kind, types.UnionType) else kind  # str of str | None
        if kind in words and name not in named:
            line = re.search(rf"^{name}  +(.+(?:\n  +.+)*)", text, re.MULTILINE)
            how = {**words[kind], "help": line and line[1].replace("%", "%%")}
            if named or parameter.kind is parameter.KEYWORD_ONLY:
                name = "--" + name.replace("_", "-")
                how |= {"required": default is parameter.empty, "default": argparse.SUPPRESS}
            parser.add_argument(name, **how)

def _stop(main, *_):
    """At SIGTERM: end at once, nothing half done is left; the workers see it and end too."""
    with contextlib.suppress(Exception):
        for file in [*_NewFile.unfinished] if os.getpid() == main else ():  # a worker has copies
            pathlib.Path(file.temporary).unlink(missing_ok=True)
    os._exit(143)

def main(argv=None):
    """Run a command -> exit code; what a user can get wrong is one sentence on stderr, and 1."""
    parser = argparse.ArgumentParser("megatron-min", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"{__version__} ({IMPLEMENTATION})")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for function in [value for name, value in globals().items() if name.startswith("_command_")]:
        text = function.__doc__.partition("\n")[0]
        sub = commands.add_parser(function.__name__.split("_")[-1], help=text, description=text)
        sub.set_defaults(function=function)
        _add_arguments(sub, function)
    options = vars(parser.parse_args(argv))
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, functools.partial(_stop, os.getpid()))
    try:
        options.pop("function")(**options)
        print(end="", flush=True)  # sys.stdout is None where a shell has closed it
        return 0
    except BrokenPipeError:  # the reader had enough, as in "demo | head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (Exception, KeyboardInterrupt) as error:
        known = isinstance(error, (ValueError, LookupError, OSError, ImportError)) and str(error)
        sentence = known or f"{type(error).__name__}: {error}".rstrip(": ")
        print("megatron-min:", *sentence.split(), file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 1

__all__ = [name for name, value in globals().items()
           if name[0] != "_" and getattr(value, "__module__", "") == __name__]

if __name__ == "__main__":
    sys.exit(main())
