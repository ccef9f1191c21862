// SPDX-License-Identifier: MIT
/* _megatron_min: the slow loops of megatron_min.py, in C.
 *
 * Each loop is defined in megatron_min.py, in plain Python with a docstring.  The loop in this file
 * must write the same bytes, in less time.  Three functions belong together:
 *
 *   definition   in parts I and II of megatron_min.py, such as _fill_rows(); says what is computed
 *   adapter      in section 18 of megatron_min.py, such as _c_fill_rows(); takes the arguments of
 *                the definition, and calls the C function
 *   C function   in this file; fills the arrays
 *
 * If a C function cannot use a value, it raises an error or returns False.  The adapter then calls
 * the definition, which raises the error that users see.  Section 6 lists all C functions and their
 * arguments.
 *
 * Rules of this file
 *   - Python allocates every array.  C borrows it through the buffer protocol, without numpy's
 *     headers.
 *   - Each C function consists of a loop and a wrapper.  The wrapper works in this order: parse,
 *     borrow, check, compute, report, release.  The loop touches no Python object and runs without
 *     the GIL.  It trusts what the wrapper has checked.
 *   - As in CPython, 0 is success and -1 is failure.  If a function that borrows or checks returns
 *     -1, it has set an exception.  A loop must not set one.  It returns -1 if a number that it has
 *     read from an array is unusable.
 *   - An array may be unaligned (the sizes in an .idx file start at byte 34).  So items are moved
 *     by memcpy, which compiles to one plain load or store.
 *   - Blends are computed in IEEE doubles, and each operation is rounded.  A build that fuses
 *     multiply-adds, and so does not round each operation, raises ImportError.
 *
 * Contents  1. Borrowed arrays  2. Sample index  3. Shuffle  4. Blending  5. Samples  6. Module
 */
#ifndef _WIN32
#include <pyconfig.h>       /* may define Py_GIL_DISABLED; on Windows, a compiler flag defines it */
#endif
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030b0000    /* 3.11: the first limited API with Py_buffer */
#endif
#include <Python.h>

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* This rejects compiler flags that change the results of double operations, if a macro shows them.
 * (FLT_EVAL_METHOD 16, of -march=native on newer CPUs, differs from 0 only for _Float16, which this
 * file does not use.)  No macro shows fused multiply-adds.  setup.py turns them off with
 * -ffp-contract=off, the pragma below does so for clang, and section 6 checks at import that there
 * are none. */
#if defined(__FAST_MATH__) || __FINITE_MATH_ONLY__ || \
    (FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16) || \
    (defined(__GCC_IEC_559) && __GCC_IEC_559 == 0)
#error "blends need IEEE doubles: build without -ffast-math and similar flags, with SSE2, not x87"
#endif
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(address) __builtin_prefetch((const void *)(address))
#define INLINE static inline __attribute__((always_inline))
#else
#define PREFETCH(address) ((void)(address))
#define INLINE static inline
#endif

enum { AHEAD = 64 };     /* how many items ahead to prefetch; 32 and 128 were slower */

/* ============================= 1. Borrowed arrays =============================
 *
 * A Py_buffer is a view of the memory of a Python object.  Each wrapper has a table of the arrays
 * that it takes.  borrow_all() raises an error for an array that the loops cannot use.  Such an
 * array has an unexpected dtype or number of axes, or gaps between items.  An array that a loop
 * writes must also be writable, and must not overlap any other array.
 */
enum { READ, WRITE, WRITE_OR_NONE };    /* None: the view stays empty */

typedef struct {
    const char *name, *dtypes;          /* dtypes in numpy's notation, such as "i4" or "u4 i8" */
    int ndim, use;
} Array;

/* Writes the dtype of a view as kind and size, such as "i4".  The kind is '?' if an item is not one
 * plain number.  A buffer format is an optional byte order and a letter.  The letter gives the
 * kind; both "l" and "q" are int64. */
static void dtype_of(const Py_buffer *view, char code[3])
{
    const char native = PY_LITTLE_ENDIAN ? '<' : '>';
    const char *format = view->format ? view->format : "B";

    if (*format && (strchr("@=^", *format) || *format == native))
        format++;
    code[0] = !format[0] || format[1] || view->itemsize > 8 ? '?'
            : strchr("bhilqn", *format) ? 'i' : strchr("BHILQN", *format) ? 'u'
            : strchr("fd", *format) ? 'f' : *format == '?' ? 'b' : '?';
    code[1] = (char)('0' + view->itemsize % 10);
    code[2] = '\0';
}

/* Borrows obj.  If this fails, the view stays empty. */
static int borrow(PyObject *obj, const Array *array, Py_buffer *view)
{
    char code[3];

    if (PyObject_GetBuffer(obj, view, PyBUF_FULL_RO) < 0)
        return -1;                      /* obj has set the exception */
    dtype_of(view, code);
    if (strstr(array->dtypes, code) && view->ndim == array->ndim &&
        PyBuffer_IsContiguous(view, 'C') && !(array->use && view->readonly))
        return 0;
    PyBuffer_Release(view);
    PyErr_Format(PyExc_TypeError, "%s: expected a C-contiguous array of dtype %s, %d axes%s",
                 array->name, array->dtypes, array->ndim, array->use ? ", writable" : "");
    return -1;
}

static int overlap(const Py_buffer *a, const Py_buffer *b)
{
    const uintptr_t a_at = (uintptr_t)a->buf, b_at = (uintptr_t)b->buf;
    return a->len && b->len && a_at < b_at + (uintptr_t)b->len && b_at < a_at + (uintptr_t)a->len;
}

/* Borrows count arrays, and checks that an array that is written shares no byte with another array.
 * The views must be empty on entry.  The caller must call release_all() later, also on failure. */
static int borrow_all(PyObject *const objects[], const Array arrays[], Py_buffer views[], int count)
{
    for (int k = 0; k < count; k++) {
        if (objects[k] == Py_None && arrays[k].use == WRITE_OR_NONE)
            continue;
        if (borrow(objects[k], &arrays[k], &views[k]) < 0)
            return -1;
        for (int j = 0; j < k; j++)
            if ((arrays[j].use || arrays[k].use) && overlap(&views[j], &views[k])) {
                PyErr_Format(PyExc_ValueError, "%s and %s: expected separate arrays, got "
                             "overlapping memory", arrays[j].name, arrays[k].name);
                return -1;
            }
    }
    return 0;
}

static void release_all(Py_buffer views[], int count)
{
    for (int k = 0; k < count; k++)
        PyBuffer_Release(&views[k]);        /* an empty view stays empty */
}

static int check_range(const char *name, long long value, long long low, long long high)
{
    if (value >= low && value <= high)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected %lld to %lld, got %lld", name, low, high, value);
    return -1;
}

static int check_equal(const char *name, long long value, long long expected)
{
    return check_range(name, value, expected, expected);
}

/* Returns item i of an array of int32 or int64.  size is the size of an item, in bytes. */
INLINE int64_t load(const char *base, int64_t i, Py_ssize_t size)
{
    int32_t narrow = 0;
    int64_t wide = 0;

    memcpy(size == 8 ? (void *)&wide : &narrow, base + size * i, size == 8 ? 8 : 4);
    return size == 8 ? wide : narrow;
}

/* Stores item i of an array of this type. */
#define PUT(type, base, i, value) do { \
        const type put_ = (type)(value); \
        memcpy((base) + (i) * (int64_t)sizeof put_, &put_, sizeof put_); \
    } while (0)

/* ============================== 2. Sample index ===============================
 *
 * Definition: _fill_rows in megatron_min.py.  Upstream: helpers.build_sample_idx.
 *
 *     document    0       1     2
 *     stream      a a a a b b b c c c c c c      S = 4 tokens in a sample, x = 1 extra
 *     row k       0       1       2       3      (0, 0)  (1, 0)  (2, 1)  (2, 5)
 *     target              5       9       13     k*S + x: tokens read when sample k-1 is complete
 *
 * The definition searches for each target in the cumulative sum of the lengths.  Targets only grow,
 * so one walk over the documents finds all of them, and needs no array of sums.
 *
 * Invariant: before document d is read, each row whose target is in documents 0..d-1 is written.
 *
 * Cost: one random read of sizes for each document, prefetched 64 documents ahead, and one store of
 * 8 or 16 bytes for each row.  The walk is over documents, not over samples.  So no address depends
 * on a sum, and all can be prefetched.
 */
typedef struct {
    char *rows;             /* (N + 1, 2), int32 or int64 */
    const char *sizes;      /* (F,) int32, tokens in each document of the file */
    const char *documents;  /* (L,) int32, which document comes d-th in the stream */
    int64_t num_samples, num_sizes, num_documents;          /* N, F, L */
    long long sequence, extra, last_token;                  /* S, x, target of row N */
    Py_ssize_t itemsize;    /* size of an item of rows, in bytes */
} Stream;

INLINE void store_row(const Stream *s, int64_t k, int64_t d, int64_t offset)
{
    const int64_t wide[2] = {d, offset};
    const int32_t narrow[2] = {(int32_t)d, (int32_t)offset};

    if (s->itemsize == 8)
        memcpy(s->rows + 16 * k, wide, sizeof wide);
    else
        memcpy(s->rows + 8 * k, narrow, sizeof narrow);
}

/* Returns the target of row k.  After the last row, it is a number that is never reached.  The walk
 * then continues to the last document, so that it checks each document number. */
INLINE int64_t target_of(const Stream *s, int64_t k)
{
    return k < s->num_samples ? k * s->sequence + s->extra
         : k == s->num_samples ? s->last_token : INT64_MAX;
}

/* Writes all rows.  Fails if a document number is out of range, if a size is negative, or if the
 * documents hold too few tokens. */
static int walk_documents(const Stream s)
{
    int64_t k = 1, before = 0, target = target_of(&s, k);

    store_row(&s, 0, 0, 0);
    for (int64_t d = 0; d < s.num_documents; d++) {
        const int64_t id = load(s.documents, d, 4);
        int64_t size, end;

        if (d + AHEAD < s.num_documents)    /* no pointer arithmetic: that id is not checked yet */
            PREFETCH((uintptr_t)s.sizes + 4 * (uintptr_t)load(s.documents, d + AHEAD, 4));
        if (id < 0 || id >= s.num_sizes)
            return -1;
        size = load(s.sizes, id, 4);
        if (size < 0)
            return -1;
        for (end = before + size; end >= target; target = target_of(&s, ++k))
            store_row(&s, k, d, target - s.extra - before);
        before = end;
    }
    return k > s.num_samples ? 0 : -1;
}

/* Checks that the targets are in order, and that no sum reaches 2^63. */
static int check_targets(const Stream *s)
{
    const int64_t limit = INT64_MAX - INT32_MAX - 1, N = s->num_samples;
    const int64_t most = s->itemsize == 4 ? INT32_MAX : limit / INT32_MAX;

    if (check_range("add_extra_token", s->extra, 0, 1) < 0 ||
        check_range("items of document_index", s->num_documents, 0, most) < 0 ||
        check_range("sequence_length", s->sequence, 1, N > 0 ? limit / N : limit) < 0)
        return -1;
    if (N == 0)
        return 0;
    return check_range("last_token", s->last_token, (N - 1) * s->sequence + s->extra + 1,
                       N * s->sequence + s->extra);
}

static PyObject *build_sample_idx(PyObject *Py_UNUSED(module), PyObject *args)
{
    static const Array arrays[] = {{"sample_index", "i4 i8", 2, WRITE}, {"sizes", "i4", 1, READ},
                                   {"document_index", "i4", 1, READ}};
    Py_buffer view[3] = {{0}}, *rows = view;
    PyObject *o[3], *result = NULL;
    long long sequence, extra, last_token;
    Stream s;
    int status;

    if (!PyArg_ParseTuple(args, "OOOLLL:build_sample_idx", o, o + 1, o + 2, &sequence, &extra,
                          &last_token))
        return NULL;
    if (borrow_all(o, arrays, view, 3) < 0 ||
        check_range("rows of sample_index", rows->shape[0], 1, LLONG_MAX) < 0 ||
        check_equal("columns of sample_index", rows->shape[1], 2) < 0)
        goto exit;
    s = (Stream){rows->buf, view[1].buf, view[2].buf, rows->shape[0] - 1, view[1].shape[0],
                 view[2].shape[0], sequence, extra, last_token, rows->itemsize};
    if (check_targets(&s) < 0)
        goto exit;
    Py_BEGIN_ALLOW_THREADS
    status = walk_documents(s);
    Py_END_ALLOW_THREADS
    if (status < 0)
        PyErr_SetString(PyExc_ValueError, "document_index: a document or its size is out of range, "
                        "or the documents have too few tokens");
    else
        result = Py_NewRef(Py_None);
exit:
    release_all(view, 3);
    return result;
}

/* ================================= 3. Shuffle =================================
 *
 * Definition: shuffle in megatron_min.py, which is numpy.random.RandomState.shuffle of a 1-D array.
 *
 * This is Fisher-Yates from the end: for i = n-1 down to 1, swap a[i] with its partner a[j], where
 * j is uniform in 0..i.  numpy finds j by masked rejection: it keeps the low bits of a draw, and
 * rejects the draw if they are above i.
 *
 *     i = 5, mask = 7      draws & mask    6  3  7  5  1  2 ..
 *                          partner of i =  5  5  4  4  4  3
 *                          accepted           3        1  2      -> j of i = 5, 4, 3
 *
 * Invariant: if w draws have been accepted for i, i - 1, ..., the next accepted draw is the partner
 * of i - w.  So each draw is stored as partner[w], and w grows by one if the draw is at most i - w.
 * This needs no branch, so none is mispredicted.
 *
 * Cost: about 1.4 draws for each item.  The partners of a block are known before its swaps are
 * made, so their cache lines are prefetched.  (numpy waits for each cache line.)  Arrays of more
 * than 2**32 items are left to numpy, because a draw would be two words.
 */
enum { MT_WORDS = 624, MT_SHIFT = 397 };

typedef struct {
    uint32_t key[MT_WORDS];     /* numpy's state["key"] */
    uint32_t draw[MT_WORDS];    /* the draws of this block: the words of key, tempered */
    int pos;                    /* numpy's state["pos"]: how many draws of this block are used */
} Generator;

/* Returns a word of the next block, mixed from three words of the key. */
INLINE uint32_t mt_mix(uint32_t high, uint32_t low, uint32_t far)
{
    const uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
    return far ^ (y >> 1) ^ ((0u - (y & 1u)) & 0x9908b0dfu);
}

static void mt_temper(Generator *g)
{
    for (int k = 0; k < MT_WORDS; k++) {
        uint32_t y = g->key[k];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        g->draw[k] = y ^ (y >> 18);
    }
}

/* Makes the next 624 draws (Matsumoto and Nishimura, 1998), in loops that compilers vectorize. */
static void mt_next_block(Generator *g)
{
    uint32_t *key = g->key;
    int k;

    for (k = 0; k < MT_WORDS - MT_SHIFT; k++)
        key[k] = mt_mix(key[k], key[k + 1], key[k + MT_SHIFT]);
    for (; k < MT_WORDS - 1; k++)
        key[k] = mt_mix(key[k], key[k + 1], key[k + MT_SHIFT - MT_WORDS]);
    key[k] = mt_mix(key[k], key[0], key[MT_SHIFT - 1]);
    mt_temper(g);
    g->pos = 0;
}

INLINE void swap_items(char *items, uint64_t i, uint64_t j, size_t width)
{
    char a[8], b[8];    /* in registers: width is the constant 4 or 8 */

    memcpy(a, items + i * width, width);
    memcpy(b, items + j * width, width);
    memcpy(items + i * width, b, width);
    memcpy(items + j * width, a, width);
}

INLINE void shuffle_items(char *items, uint64_t n, size_t width, Generator *g)
{
    uint32_t partner[MT_WORDS];
    uint64_t i = n ? n - 1 : 0, mask = UINT32_MAX;

    while (i > 0) {
        uint32_t count, accepted = 0;
        while (mask >> 1 >= i)
            mask >>= 1;
        if (g->pos == MT_WORDS)
            mt_next_block(g);
        /* Use the draws that are left in the block, but no more than while i has this mask. */
        count = (uint32_t)(MT_WORDS - g->pos);
        if (count > i - (mask >> 1))
            count = (uint32_t)(i - (mask >> 1));
        for (uint32_t k = 0; k < count; k++) {
            partner[accepted] = g->draw[g->pos + (int)k] & (uint32_t)mask;
            accepted += partner[accepted] <= (uint32_t)i - accepted;
        }
        g->pos += (int)count;
        for (uint32_t k = 0; k < accepted && k < AHEAD; k++)
            PREFETCH(items + partner[k] * width);
        for (uint32_t k = 0; k < accepted; k++) {
            if (k + AHEAD < accepted)
                PREFETCH(items + partner[k + AHEAD] * width);
            swap_items(items, i - k, partner[k], width);
        }
        i -= accepted;
    }
}

static PyObject *shuffle(PyObject *Py_UNUSED(module), PyObject *args)
{
    static const Array arrays[] = {{"array", "i4 u4 i8", 1, WRITE}, {"key", "u4", 1, WRITE}};
    Py_buffer view[2] = {{0}}, *array = view, *key = view + 1;
    PyObject *o[2], *result = NULL;
    Generator g;

    if (!PyArg_ParseTuple(args, "OOi:shuffle", o, o + 1, &g.pos))
        return NULL;
    if (borrow_all(o, arrays, view, 2) < 0 ||
        check_range("items of array", array->shape[0], 0, 1LL << 32) < 0 ||
        check_equal("items of key", key->shape[0], MT_WORDS) < 0 ||
        check_range("pos", g.pos, 0, MT_WORDS) < 0)
        goto exit;
    Py_BEGIN_ALLOW_THREADS
    memcpy(g.key, key->buf, sizeof g.key);
    mt_temper(&g);
    if (array->itemsize == 8)
        shuffle_items(array->buf, (uint64_t)array->shape[0], 8, &g);
    else
        shuffle_items(array->buf, (uint64_t)array->shape[0], 4, &g);
    memcpy(key->buf, g.key, sizeof g.key);
    Py_END_ALLOW_THREADS
    result = PyLong_FromLong(g.pos);
exit:
    release_all(view, 2);
    return result;
}

/* ================================= 4. Blending ================================
 *
 * Definition: _fill_blend in megatron_min.py, for plain and for exhaustive blends.
 * Upstream: helpers.build_blending_indices, helpers.build_exhaustive_blending_indices.
 *
 * Sample i comes from the dataset with the largest lag.  Ties go to the lowest d.
 *
 *     lag[d] = weight[d] * max(i, 1) - taken[d]          two operations, each rounded to a double
 *
 * If there are many datasets, most of them were drawn recently and cannot win.  So samples are
 * drawn in runs of R = 2 * sqrt(D) steps, and a run compares only its candidates.  These are the
 * datasets whose lag would reach a bar at the last step of the run if no dataset were drawn.
 *
 *     lag
 *      |   a ____________----   ends above the bar: a candidate
 *      | - - - - - - - - - - - - - - - - - - bar
 *      |   b ___________-----   ends below the bar: not a candidate in this run
 *      |   c ______
 *      |           \_________   a draw lowers the lag by 1
 *      +---|-----------------|---> i
 *        first             last
 *
 * Invariant: a candidate that wins with a lag at or above the bar is the winner of the plain rule.
 * Proof: let d be a dataset that is not a candidate, and i a step of the run.  d is not drawn in
 * the run, so taken[d] stays the same.  weight[d] * i <= weight[d] * last, and rounding keeps the
 * order of two numbers.  So the rounded products are in this order, and so are the rounded
 * differences with taken[d].  Hence lag of d at i <= lag of d at last < bar <= lag of the winner:
 * d loses, and there is no tie.
 *
 * If the best candidate is below the bar, the run ends before this sample.  The next bar is a
 * margin below the lag of this candidate.  The true winner lags at least as much, so it is a
 * candidate of the next run.  After a run that reached its last step, the next bar is a margin
 * below the lag that won there.  Such a run makes the margin smaller; a run that ended early makes
 * it larger.
 *
 * If consecutive datasets have equal weight and equal taken, only the first R of them need to be
 * candidates.  Each of these wins against the rest until it is drawn, and a run draws at most R.
 *
 * Cost: with more than FEW datasets, fewer than sqrt(D) comparisons for each sample, instead of D.
 * With 1024 datasets, a sample takes 0.1 us instead of 0.6.  Only weights that differ very little
 * cost up to D comparisons.
 */
enum { LANES = 4, FEW = 32 };     /* up to FEW datasets: one run, and all datasets are candidates */

typedef struct {
    Py_ssize_t count;   /* number of datasets.  LANES padding items with lag -infinity follow */
    double *weight;     /* samples of the dataset per sample of the blend */
    double *taken;      /* number of samples drawn so far; infinity once the dataset is used up */
} Datasets;

typedef struct {
    Datasets all, candidates;
    double *limit;                  /* number of samples in each dataset; infinity: no limit */
    int16_t *number;                /* dataset number of each candidate */
    char *dataset_index;            /* (size,) int16, number of the dataset of sample i */
    char *dataset_sample_index;     /* (size,) int64, number of the sample in this dataset */
    Py_ssize_t size;
} Blend;

/* Sets *top to the largest lag, and returns the first index that has it.  With one running maximum,
 * each comparison would wait for the one before.  So there are LANES independent maxima. */
INLINE Py_ssize_t find_top(const Datasets *some, double step, double *top)
{
    const double *weight = some->weight, *taken = some->taken;
    double best[LANES];
    Py_ssize_t d;

    for (int k = 0; k < LANES; k++)
        best[k] = weight[k] * step - taken[k];
    for (d = LANES; d < some->count; d += LANES)
        for (int k = 0; k < LANES; k++) {
            const double lag = weight[d + k] * step - taken[d + k];
            best[k] = lag > best[k] ? lag : best[k];
        }
    *top = best[0];
    for (int k = 1; k < LANES; k++)
        *top = best[k] > *top ? best[k] : *top;
    for (d = 0; d < some->count - 1 && weight[d] * step - taken[d] < *top; d++)
        ;       /* the last dataset is not compared: it has the largest lag if no other has */
    return d;
}

/* Copies the datasets that reach the bar at step last.  Each dataset is written after the
 * candidates before it, and n grows by one only if it is a candidate.  This needs no branch, so
 * none is mispredicted. */
static void pick_candidates(Blend *b, double last, double bar, Py_ssize_t run)
{
    Datasets *some = &b->candidates;
    double weight = -1.0, taken = -1.0;
    Py_ssize_t n = 0, same = 0;             /* same: how many datasets just before d equal it */

    for (Py_ssize_t d = 0; d < b->all.count; d++) {
        const int equal = (b->all.weight[d] == weight) & (b->all.taken[d] == taken);
        some->weight[n] = weight = b->all.weight[d];
        some->taken[n] = taken = b->all.taken[d];
        b->number[n] = (int16_t)d;
        same = equal ? same + 1 : 0;
        n += (weight * last - taken >= bar) & (same < run);
    }
    some->count = n;
    for (Py_ssize_t k = n; k < n + LANES; k++) {
        some->weight[k] = 0.0;
        some->taken[k] = INFINITY;
    }
}

static void blend(Blend *b)
{
    double bar = -DBL_MAX, margin = 1.0, top = 0.0;     /* every finite lag reaches this bar */
    Py_ssize_t i = 0, run = 1;

    while (run * run < 4 * b->all.count)
        run++;
    if (b->all.count <= FEW)
        run = b->size;
    if (b->all.count == 1)                              /* the only dataset wins with any lag */
        for (; i < b->size; i++) {
            PUT(int16_t, b->dataset_index, i, 0);
            PUT(int64_t, b->dataset_sample_index, i, i);
        }
    while (i < b->size) {
        const Py_ssize_t end = run < b->size - i ? i + run : b->size;

        pick_candidates(b, (double)(end > 2 ? end - 1 : 1), bar, run);
        for (; i < end; i++) {
            const Py_ssize_t winner = find_top(&b->candidates, (double)(i > 1 ? i : 1), &top);
            const Py_ssize_t d = b->number[winner];
            const double taken = b->all.taken[d];

            if (top < bar)
                break;
            PUT(int16_t, b->dataset_index, i, d);
            PUT(int64_t, b->dataset_sample_index, i, taken);    /* exact: below 2**53 */
            b->all.taken[d] = taken + 1.0 < b->limit[d] ? taken + 1.0 : INFINITY;
            b->candidates.taken[winner] = b->all.taken[d];
        }
        margin *= i == end ? 0.9 : 1.5;
        margin = margin > 1e-5 ? margin : 1e-5;
        bar = top - margin > -DBL_MAX ? top - margin : -DBL_MAX;
    }
}

/* Sets taken.  Checks that no lag can be NaN, and that the datasets have enough samples.  With too
 * few, the loop of blend() would not end. */
static int check_datasets(Blend *b)
{
    double room = 0.0;

    for (Py_ssize_t d = 0; d < b->all.count; d++) {
        const double weight = b->all.weight[d];

        if (!(weight >= 0.0 && weight <= 1e288)) {      /* so weight * step is finite */
            PyErr_Format(PyExc_ValueError, "weights[%zd]: expected a finite number >= 0", d);
            return -1;
        }
        b->all.taken[d] = b->limit[d] > 0.0 ? 0.0 : INFINITY;
        room += b->limit[d];
    }
    if (room >= (double)b->size)
        return 0;
    PyErr_SetString(PyExc_ValueError, "limits: expected a sum of at least size");
    return -1;
}

static PyObject *build_blend(PyObject *Py_UNUSED(module), PyObject *args)
{
    static const Array arrays[] = {
        {"dataset_index", "i2", 1, WRITE}, {"dataset_sample_index", "i8", 1, WRITE},
        {"weights", "f8", 1, READ}, {"limits", "f8", 1, READ},
    };
    PyObject *o[4], *result = NULL;
    Py_buffer view[4] = {{0}}, *weights = view + 2, *limits = view + 3;
    Py_ssize_t count, size, padded;
    double *memory = NULL;
    Blend b;

    if (!PyArg_ParseTuple(args, "OOOOn:build_blend", o, o + 1, o + 2, o + 3, &size))
        return NULL;
    if (borrow_all(o, arrays, view, 4) < 0)
        goto exit;
    count = weights->shape[0];
    if (check_range("items of weights", count, 1, INT16_MAX - 1) < 0 ||
        check_equal("items of limits", limits->shape[0], count) < 0 ||
        check_range("size", size, 0, LLONG_MAX) < 0 ||
        check_range("items of dataset_index", view[0].shape[0], size, LLONG_MAX) < 0 ||
        check_range("items of dataset_sample_index", view[1].shape[0], size, LLONG_MAX) < 0)
        goto exit;
    padded = count + LANES;
    memory = PyMem_Calloc((size_t)padded, 5 * sizeof(double) + sizeof(int16_t));
    if (!memory) {
        PyErr_NoMemory();
        goto exit;
    }
    b = (Blend){{count, memory, memory + padded}, {0, memory + 2 * padded, memory + 3 * padded},
                memory + 4 * padded, (int16_t *)(memory + 5 * padded), view[0].buf, view[1].buf,
                size};
    memcpy(b.all.weight, weights->buf, (size_t)weights->len);
    memcpy(b.limit, limits->buf, (size_t)limits->len);
    if (check_datasets(&b) < 0)
        goto exit;
    Py_BEGIN_ALLOW_THREADS
    blend(&b);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
exit:
    PyMem_Free(memory);
    release_all(view, 4);
    return result;
}

/* ================================= 5. Samples =================================
 *
 * Definition: GPTDataset.__getitem__ in megatron_min.py; a batch is a stack of samples.
 * Upstream: GPTDataset.__getitem__, and the collation of a batch.
 *
 *     stream          a a a a b b b c c c c c c      S = 4, x = 1
 *     sample_index            ^       ^              row 1 is (1, 0) and row 2 is (2, 1): sample 1
 *     pieces                  b b b c c              they end at (2, 1 + x)
 *     tokens                  b b b c                all but the last token
 *     labels                    b b c c              all but the first token
 *     position_ids            0 1 2 3                by documents: 0 1 2 0
 *     cu_seqlens              0     3 4 4 4          by documents: starts of pieces, then S
 *
 * Each number that is read from an array is checked before it becomes an address.  An invalid
 * number in shuffle_index, sample_index, document_index or the .idx ends the loop.  The definition
 * then runs and raises the error.
 *
 * Cost: each piece is read once, and 28 bytes are written for each token.  A second pass over the
 * tokens of a sample is needed only for eod, a mask, padding, or a pad id that tokens may have.
 */
enum {      /* the arrays; all before OUT_ROWS are written */
    TOKENS, LABELS, LOSS_MASK, POSITIONS, CU_SEQLENS, MAX_SEQLEN, MASK, OUT_ROWS, SAMPLE_NUMBERS,
    ITEMS, POINTERS, LENGTHS, DOCUMENTS, SAMPLES, SHUFFLE, ARRAYS
};

static const Array batch_arrays[ARRAYS] = {
    {"tokens", "i8", 2, WRITE}, {"labels", "i8", 2, WRITE}, {"loss_mask", "f4", 2, WRITE},
    {"position_ids", "i8", 2, WRITE}, {"cu_seqlens", "i4", 2, WRITE_OR_NONE},
    {"max_seqlen", "i4", 1, WRITE_OR_NONE}, {"attention_mask", "b1", 4, WRITE_OR_NONE},
    {"rows", "i8", 1, READ}, {"sample_numbers", "i8", 1, READ},
    {"items", "u1 i1 u2 i2 i4 i8", 1, READ}, {"pointers", "i8", 1, READ},
    {"lengths", "i4", 1, READ}, {"document_index", "i4", 1, READ},
    {"sample_index", "i4 i8", 2, READ}, {"shuffle_index", "u4 i8", 1, READ},
};

typedef struct {
    Py_buffer array[ARRAYS];
    int64_t batch, length;                  /* B, S */
    long long extra, pad, eod;              /* x, and two ids */
    int by_eod, by_document;                /* where positions restart */
    int mask_loss, reset_mask;
    int needs_second_pass;                  /* 0: only padded samples need one */
    char code[3];                           /* dtype of ITEMS */
} Batch;

#define item_of(view, i) load((view)->buf, i, (view)->itemsize)

/* The loop of widen() for one dtype. */
#define WIDEN_FROM(dtype, type) \
    if (code[0] == (dtype)[0] && code[1] == (dtype)[1]) \
        for (int64_t i = 0; i < n; i++) { \
            type item; \
            memcpy(&item, from + i * (int64_t)sizeof item, sizeof item); \
            PUT(int64_t, to, i, item); \
        }

/* Copies n tokens of dtype code to int64. */
static void widen(char *to, const char *from, const char code[3], int64_t n)
{
    WIDEN_FROM("u1", uint8_t) WIDEN_FROM("i1", int8_t) WIDEN_FROM("u2", uint16_t)
    WIDEN_FROM("i2", int16_t) WIDEN_FROM("i4", int32_t) WIDEN_FROM("i8", int64_t)
}

/* Writes first, first + step, ... to items start .. end - 1. */
INLINE void count_up(char *to, int64_t start, int64_t end, int64_t first, int64_t step)
{
    for (int64_t i = start; i < end; i++, first += step)
        PUT(int64_t, to, i, first);
}

/* Writes the tokens between rows j and j + 1 of sample_index, piece by piece, and what depends on
 * where pieces start.  Returns the number of tokens, or -1 if an index is out of range. */
static int64_t read_pieces(const Batch *b, char *const row[], int64_t j)
{
    const Py_buffer *array = b->array, *items = &array[ITEMS];
    const int64_t length = b->length, width = items->itemsize;
    int64_t at = 0, longest = 0, documents = 0;
    int64_t start = 0;                  /* where the current document begins */
    int64_t edge[4];                    /* first document, begin in it, last document, end in it */

    for (int k = 0; k < 4; k++)
        edge[k] = item_of(&array[SAMPLES], 2 * j + k);
    if (edge[0] < 0 || edge[0] > edge[2] || edge[2] >= array[DOCUMENTS].shape[0] ||
        edge[1] < 0 || edge[3] < 0 || edge[3] > INT32_MAX)
        return -1;
    for (int64_t d = edge[0]; d <= edge[2]; d++) {
        const int64_t id = item_of(&array[DOCUMENTS], d), begin = d == edge[0] ? edge[1] : 0;
        int64_t size, end, pointer, n, room = length - at;
        const char *from;

        if (id < 0 || id >= array[LENGTHS].shape[0])
            return -1;
        size = item_of(&array[LENGTHS], id);
        pointer = item_of(&array[POINTERS], id);
        end = d == edge[2] ? edge[3] + b->extra : size;
        n = end - begin;
        if (n < 0 || n > room + b->extra || end > size || pointer < 0 || pointer % width ||
            pointer / width > items->shape[0] - size)
            return -1;
        if (n == 0)
            continue;
        from = (const char *)items->buf + pointer + begin * width;
        widen(row[TOKENS] + 8 * at, from, b->code, n < room ? n : room);
        if (n > room)                                       /* the extra token is only a label */
            widen(row[LABELS] + 8 * (length - 1), from + room * width, b->code, 1);
        if (b->by_document && at > 0 && at < length) {
            PUT(int32_t, row[CU_SEQLENS], documents++, start);
            count_up(row[POSITIONS], start, at, 0, 1);
            longest = at - start > longest ? at - start : longest;
            start = at;
        }
        at += n;
    }
    if (b->by_document) {
        PUT(int32_t, row[CU_SEQLENS], documents++, start);
        count_up(row[POSITIONS], start, length, 0, 1);
        PUT(int32_t, row[MAX_SEQLEN], 0, length - start > longest ? length - start : longest);
        for (; documents <= length; documents++)
            PUT(int32_t, row[CU_SEQLENS], documents, length);
    }
    return at;
}

/* Restarts the positions of a sample after eod, fills in the masks, and replaces pad ids by 0. */
static void second_pass(const Batch *b, char *const row[])
{
    char *tokens = row[TOKENS], *labels = row[LABELS];
    const int64_t length = b->length, pad = b->pad, eod = b->eod;
    int64_t start = 0;

    for (int64_t i = 0; i < length; i++) {
        const int64_t token = load(tokens, i, 8), label = load(labels, i, 8);

        if (row[MASK]) {                            /* 1: token i may not attend */
            const int64_t first = b->reset_mask ? start : 0;
            memset(row[MASK] + i * length, 1, (size_t)length);
            memset(row[MASK] + i * length + first, 0, (size_t)(i + 1 - first));
        }
        if (token == eod) {
            if (b->by_eod)
                count_up(row[POSITIONS], start, i + 1, 0, 1);
            start = i + 1;
        }
        if (label == pad || (token == eod && b->mask_loss))
            PUT(float, row[LOSS_MASK], i, 0);
        if (token == pad)
            PUT(int64_t, tokens, i, 0);
        if (label == pad)
            PUT(int64_t, labels, i, 0);
    }
    if (b->by_eod)
        count_up(row[POSITIONS], start, length, 0, 1);
}

/* Writes all samples.  Fails if an index is out of range. */
static int read_batch(const Batch *b)
{
    const Py_buffer *array = b->array, *shuffle = &array[SHUFFLE];
    const int64_t length = b->length, samples = array[SAMPLES].shape[0] - 1;
    char *row[OUT_ROWS] = {NULL};

    for (int64_t n = 0; n < array[SAMPLE_NUMBERS].shape[0]; n++) {
        const int64_t r = item_of(&array[OUT_ROWS], n), number = item_of(&array[SAMPLE_NUMBERS], n);
        const int64_t k = number < 0 ? number + samples : number;   /* -1 is the last sample */
        int64_t j, size;

        if (r < 0 || r >= b->batch || k < 0 || k >= samples || k >= shuffle->shape[0])
            return -1;
        for (int a = 0; a < OUT_ROWS; a++)
            if (array[a].obj)
                row[a] = (char *)array[a].buf + r * (array[a].len / b->batch);
        j = shuffle->itemsize == 4 ? (uint32_t)item_of(shuffle, k) : item_of(shuffle, k);
        if (j < 0 || j >= samples)
            return -1;
        size = read_pieces(b, row, j);
        if (size < 0)
            return -1;
        count_up(row[TOKENS], size, length, b->pad, 0);
        memcpy(row[LABELS], row[TOKENS] + 8, 8 * (size_t)(length - 1));
        if (size <= length)
            PUT(int64_t, row[LABELS], length - 1, b->pad);
        for (int64_t i = 0; i < length; i++)
            PUT(float, row[LOSS_MASK], i, 1);
        if (!b->by_document && !b->by_eod)
            count_up(row[POSITIONS], 0, length, 0, 1);
        if (b->needs_second_pass || size <= length)
            second_pass(b, row);
    }
    return 0;
}

static int check_batch(const Batch *b)
{
    const Py_buffer *array = b->array;
    const int64_t B = b->batch, S = b->length, items[OUT_ROWS] = {S, S, S, S, S + 1, 1, S * S};

    for (int k = 0; k < OUT_ROWS; k++)
        if (array[k].obj &&
            (check_equal(batch_arrays[k].name, array[k].shape[0], B) < 0 ||
             (B && check_equal(batch_arrays[k].name, array[k].len / array[k].itemsize / B,
                               items[k]) < 0)))
            return -1;
    if (check_range("add_extra_token", b->extra, 0, 1) < 0 ||
        check_equal("arrays for max_seqlen", array[MAX_SEQLEN].obj != NULL, b->by_document) < 0 ||
        check_equal("items of rows", array[OUT_ROWS].shape[0],
                    array[SAMPLE_NUMBERS].shape[0]) < 0 ||
        check_range("items of pointers", array[POINTERS].shape[0], array[LENGTHS].shape[0],
                    LLONG_MAX) < 0 ||
        check_equal("columns of sample_index", array[SAMPLES].shape[1], 2) < 0)
        return -1;
    return 0;
}

static PyObject *read_samples(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *o[ARRAYS], *result = NULL;
    Batch b = {0};
    int status;

    if (!PyArg_ParseTuple(args, "OOOOOOOOOOOOOOOLLLppp:read_samples", o, o + 1, o + 2, o + 3, o + 4,
                          o + 5, o + 6, o + 7, o + 8, o + 9, o + 10, o + 11, o + 12, o + 13,
                          o + 14, &b.extra, &b.pad, &b.eod, &b.by_eod, &b.mask_loss,
                          &b.reset_mask))
        return NULL;
    if (borrow_all(o, batch_arrays, b.array, ARRAYS) < 0)
        goto exit;
    b.batch = b.array[TOKENS].shape[0];
    b.length = b.array[TOKENS].shape[1];
    b.by_document = b.array[CU_SEQLENS].obj != NULL;
    b.by_eod &= !b.by_document;
    dtype_of(&b.array[ITEMS], b.code);
    b.needs_second_pass = b.by_eod || b.mask_loss || b.array[MASK].obj || b.code[0] == 'i' ||
                          (b.pad >= 0 && b.pad >> 8 * b.array[ITEMS].itemsize == 0);
    if (check_range("sequence_length", b.length, 1, INT32_MAX - 1) < 0 || check_batch(&b) < 0)
        goto exit;
    Py_BEGIN_ALLOW_THREADS
    status = read_batch(&b);
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(status == 0);
exit:
    release_all(b.array, ARRAYS);
    return result;
}

/* ================================== 6. Module ================================= */

/* megatron_min.py uses this module only if VERSION equals _VERSION_OF_C in its section 18.  Change
 * both if a function is added or removed, or if its arguments or results change. */
enum { VERSION = 2 };

static PyMethodDef methods[] = {
    {"build_sample_idx", build_sample_idx, METH_VARARGS,
     "build_sample_idx($module, sample_index, sizes, document_index, sequence_length,\n"
     "                 add_extra_token, last_token, /)\n--\n\n"
     "Fill in sample_index.  The last sample ends before token last_token of the stream."},
    {"shuffle", shuffle, METH_VARARGS,
     "shuffle($module, array, key, pos, /)\n--\n\n"
     "Shuffle array as a RandomState with this key and pos does; change key, return the new pos."},
    {"build_blend", build_blend, METH_VARARGS,
     "build_blend($module, dataset_index, dataset_sample_index, weights, limits, size, /)\n--\n\n"
     "Fill in the first two arrays.  Dataset d has limits[d] samples."},
    {"read_samples", read_samples, METH_VARARGS,
     "read_samples($module, tokens, labels, loss_mask, position_ids, cu_seqlens, max_seqlen,\n"
     "             attention_mask, rows, sample_numbers, items, pointers, lengths,\n"
     "             document_index, sample_index, shuffle_index, extra, pad, eod, by_eod,\n"
     "             mask_loss, reset_mask, /)\n--\n\n"
     "Fill in the first seven arrays.  Return False if an index is out of range."},
    {NULL, NULL, 0, NULL},
};

/* Initializes the module.  Fails if the compiler fused multiply-adds: these round only once, so a
 * lag of section 4 would be different.  With e = 2**-52, the product (1 + e) * (1 - e) is
 * 1 - e * e, which is rounded to 1. */
static int module_exec(PyObject *module)
{
    const volatile double weight = 1.0 + DBL_EPSILON, step = 1.0 - DBL_EPSILON, taken = 1.0;

    if (weight * step - taken == 0.0)           /* volatile: computed here, not by the compiler */
        return PyModule_AddIntConstant(module, "VERSION", VERSION);
    PyErr_SetString(PyExc_ImportError, "_megatron_min was built with fused multiply-adds, which "
                    "change blends; build it with -ffp-contract=off");
    return -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_megatron_min",
    .m_doc = "The slow loops of megatron_min.py, in C.", .m_methods = methods, .m_slots = slots,
};
/* Py_mod_gil is not set, so a free-threaded Python enables its GIL.  The module was not tested
 * without a GIL. */

PyMODINIT_FUNC PyInit__megatron_min(void)
{
    return PyModuleDef_Init(&definition);
}
