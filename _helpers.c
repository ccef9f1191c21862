// SPDX-License-Identifier: MIT
/* _megatron_min: the slow loops of megatron_min.py, in C.
 *
 * What each loop computes is defined in megatron_min.py, in plain Python with a docstring.  This
 * file has to give the same bytes, only sooner.  Three pieces belong together:
 *
 *   definition   in part I of megatron_min.py, such as _fill_rows(): what is computed
 *   adapter      in its section 18, such as _c_fill_rows(): has the arguments of the definition,
 *                and calls the function of C
 *   function     in this file: fills the arrays
 *
 * Where a function finds a value that it cannot use, it raises an error or returns False; then the
 * adapter calls the definition, which raises the error that users see.  All functions and their
 * arguments are listed in section 6 below.
 *
 * Rules of this file
 *   - Python allocates every array.  C borrows it through the buffer protocol, without numpy's
 *     headers.
 *   - A function of the module is a loop and a wrapper around it.  The wrapper works in this order:
 *     parse, borrow, check, compute, report, release.  The loop touches no Python object and runs
 *     without the GIL.  It trusts what the wrapper has checked.
 *   - As in CPython, 0 is success and -1 is failure.  A function that borrows or checks has set an
 *     exception then; a loop, which may not, has met a number that it cannot use.
 *   - Arrays may lie at any address (the sizes in an .idx file start at byte 34).  So items are
 *     moved by memcpy, which compiles to one plain load or store.
 *   - A blend is computed in IEEE doubles, and each operation is rounded.  A build that does not
 *     round each cannot be imported.
 *
 * Contents  1. Borrowed arrays  2. Sample index  3. Shuffle  4. Blending  5. Samples  6. Module
 */
#ifndef _WIN32
#include <pyconfig.h>                /* tells whether this Python has a GIL; Windows has a flag */
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

/* Flags that change doubles are refused, where the compiler tells of them.  It tells nothing of fused
 * multiply-adds: setup.py builds with -ffp-contract=off, clang has a pragma, and what is fused all
 * the same is found at import, in section 6. */
#if defined(__FAST_MATH__) || __FINITE_MATH_ONLY__ || FLT_EVAL_METHOD != 0 || \
    (defined(__GCC_IEC_559) && __GCC_IEC_559 == 0)
#error "blends need plain IEEE doubles: no -ffast-math or a flag of its kind, no x87 registers"
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

enum { AHEAD = 64 };     /* items are prefetched so many places before; 32 and 128 were slower */

/* ============================= 1. Borrowed arrays =============================
 *
 * A Py_buffer is a view of the memory of a Python object.  Each wrapper has a table of the arrays
 * that it takes.  borrow_all() refuses what the loops cannot use: another dtype or number of axes,
 * and gaps between items.  An array that is written must also be writable, and overlap no other
 * array.
 */
enum { READ, WRITE, WRITE_OR_NONE };    /* None: the view stays empty */

typedef struct {
    const char *name, *dtypes;          /* as numpy writes them, "i4" or "u4 i8" */
    int ndim, use;
} Array;

/* Writes the dtype of a view as kind and size, such as "i4".  The kind is '?' where an item is not
 * one plain number.  A buffer format is an optional byte order and a letter that gives the kind:
 * int64 is "l" or "q". */
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

/* Borrows obj.  On failure the view is empty, as before. */
static int borrow(PyObject *obj, const Array *array, Py_buffer *view)
{
    char code[3];

    if (PyObject_GetBuffer(obj, view, PyBUF_FULL_RO) < 0)
        return -1;                      /* with the error of obj */
    dtype_of(view, code);
    if (strstr(array->dtypes, code) && view->ndim == array->ndim &&
        PyBuffer_IsContiguous(view, 'C') && !(array->use && view->readonly))
        return 0;
    PyBuffer_Release(view);
    PyErr_Format(PyExc_TypeError, "%s: wanted a C-contiguous array of dtype %s, %d axes%s",
                 array->name, array->dtypes, array->ndim, array->use ? ", writable" : "");
    return -1;
}

static int overlap(const Py_buffer *a, const Py_buffer *b)
{
    const uintptr_t a_at = (uintptr_t)a->buf, b_at = (uintptr_t)b->buf;
    return a->len && b->len && a_at < b_at + (uintptr_t)b->len && b_at < a_at + (uintptr_t)a->len;
}

/* Borrows count arrays, and checks that an array that is written shares no byte with another one.
 * The views must be empty before.  release_all() must be called later, whatever this returns. */
static int borrow_all(PyObject *const objects[], const Array arrays[], Py_buffer views[], int count)
{
    for (int k = 0; k < count; k++) {
        if (objects[k] == Py_None && arrays[k].use == WRITE_OR_NONE)
            continue;
        if (borrow(objects[k], &arrays[k], &views[k]) < 0)
            return -1;
        for (int j = 0; j < k; j++)
            if ((arrays[j].use || arrays[k].use) && overlap(&views[j], &views[k])) {
                PyErr_Format(PyExc_ValueError, "%s and %s: wanted two arrays, found overlapping "
                             "memory", arrays[j].name, arrays[k].name);
                return -1;
            }
    }
    return 0;
}

static void release_all(Py_buffer views[], int count)
{
    for (int k = 0; k < count; k++)
        PyBuffer_Release(&views[k]);        /* does nothing to an empty view */
}

static int check_range(const char *name, long long value, long long low, long long high)
{
    if (value >= low && value <= high)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: wanted %lld to %lld, found %lld", name, low, high, value);
    return -1;
}

/* Returns item i of an array of int32 or int64; size is that of an item, in bytes. */
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
 * The definition looks each target up in the cumulative sum of the lengths.  Targets only grow, so
 * one forward walk over the documents finds them all, without that array.
 *
 * Invariant: before document d is read, every row whose target lies in documents 0..d-1 is written.
 *
 * Cost: for each document one random read of sizes, prefetched 64 documents ahead, and for each row
 * one store of 8 or 16 bytes.  The walk goes over documents and not over samples, so that addresses
 * do not depend on sums and can be prefetched.
 */
typedef struct {
    char *rows;             /* (N + 1, 2), int32 or int64 */
    const char *sizes;      /* (F,) int32, tokens in each document of the file */
    const char *documents;  /* (L,) int32, which document comes d-th in the stream */
    int64_t num_samples, num_sizes, num_documents;          /* N, F, L */
    long long sequence, extra, last_token;                  /* S, x, target of row N */
    Py_ssize_t itemsize;    /* of rows, in bytes */
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

/* Returns the target of row k.  Behind the last row it is one that is never reached: the walk goes
 * on to the end of the documents, so that each id is checked. */
INLINE int64_t target_of(const Stream *s, int64_t k)
{
    return k < s->num_samples ? k * s->sequence + s->extra
         : k == s->num_samples ? s->last_token : INT64_MAX;
}

/* Writes all rows.  Fails if a document is not there, or they hold too few tokens for the rows. */
static int walk_documents(const Stream s)
{
    int64_t k = 1, before = 0, target = target_of(&s, k);

    store_row(&s, 0, 0, 0);
    for (int64_t d = 0; d < s.num_documents; d++) {
        const int64_t id = load(s.documents, d, 4);
        int64_t size, end;

        if (d + AHEAD < s.num_documents)    /* this id is not checked yet: compute no pointer */
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

/* Checks that targets are in order, and that no sum reaches 2^63. */
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
        check_range("columns of sample_index", rows->shape[1], 2, 2) < 0)
        goto exit;
    s = (Stream){rows->buf, view[1].buf, view[2].buf, rows->shape[0] - 1, view[1].shape[0],
                 view[2].shape[0], sequence, extra, last_token, rows->itemsize};
    if (check_targets(&s) < 0)
        goto exit;
    Py_BEGIN_ALLOW_THREADS
    status = walk_documents(s);
    Py_END_ALLOW_THREADS
    if (status < 0)
        PyErr_SetString(PyExc_ValueError, "document_index: wanted documents that hold the tokens");
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
 * Fisher-Yates from the top: for i = n-1 down to 1, swap a[i] with a[j], with j uniform in 0..i.
 * numpy finds j by masked rejection: it keeps the low bits of a draw, and takes another draw where
 * they are above i.
 *
 *     i = 5, mask = 7      draws & mask    6  3  7  5  1  2 ..
 *                          i wanted        5  5  4  4  4  3
 *                          accepted           3        1  2      -> j of i = 5, 4, 3
 *
 * Invariant: when w draws were accepted since i, the next accepted one is the partner of i - w.  So
 * every draw is stored at place w, and w grows by one exactly if the draw is at most i - w: there
 * is no branch that could be mispredicted.
 *
 * Cost: about 1.4 draws for each item.  The partners of a block are known before its swaps are
 * made, so their cache lines are prefetched; numpy waits for each of them.  Arrays of more than
 * 2**32 items, for which a draw would be two words, are left to numpy.
 */
enum { MT_WORDS = 624, MT_SHIFT = 397 };

typedef struct {
    uint32_t key[MT_WORDS];     /* numpy's state["key"] */
    uint32_t draw[MT_WORDS];    /* the numbers that these words give, tempered */
    int pos;                    /* numpy's state["pos"]: draws of this block already used */
} Generator;

/* Mixes one word of the next block from three of the present one. */
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

/* Makes the next 624 draws (Matsumoto and Nishimura, 1998), in loops that vectors can run. */
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
        uint32_t count, want = 0;
        while (mask >> 1 >= i)
            mask >>= 1;
        if (g->pos == MT_WORDS)
            mt_next_block(g);
        count = (uint32_t)(MT_WORDS - g->pos);      /* draws to look at: not more than are left, */
        if (count > i - (mask >> 1))                /* and only while i keeps this mask */
            count = (uint32_t)(i - (mask >> 1));
        for (uint32_t k = 0; k < count; k++) {
            partner[want] = g->draw[g->pos + (int)k] & (uint32_t)mask;
            want += partner[want] <= (uint32_t)i - want;
        }
        g->pos += (int)count;
        for (uint32_t k = 0; k < want && k < AHEAD; k++)
            PREFETCH(items + partner[k] * width);
        for (uint32_t k = 0; k < want; k++) {
            if (k + AHEAD < want)
                PREFETCH(items + partner[k + AHEAD] * width);
            swap_items(items, i - k, partner[k], width);
        }
        i -= want;
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
        check_range("items of key", key->shape[0], MT_WORDS, MT_WORDS) < 0 ||
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
 * Definition: _fill_blend in megatron_min.py, of plain and of exhaustive blends.
 * Upstream: helpers.build_blending_indices, helpers.build_exhaustive_blending_indices.
 *
 * Sample i comes from the dataset with the largest lag, and from the lowest d among equals:
 *
 *     lag[d] = weight[d] * max(i, 1) - taken[d]          two operations, each rounded to a double
 *
 * Where there are many datasets, most were drawn a moment ago and cannot win.  So samples are made
 * in runs of R = 2 * sqrt(D), and a run looks only at its candidates: the datasets that would reach
 * a bar at the last step of the run if none were drawn.
 *
 *     lag
 *      |   a ____________----   ends above the bar: a candidate
 *      | - - - - - - - - - - - - - - - - - - bar
 *      |   b ___________-----   ends below the bar: not looked at in this run
 *      |   c ______
 *      |           \_________   a draw takes 1 off
 *      +---|-----------------|---> i
 *        first             last
 *
 * Invariant: a candidate that wins with a lag at or above the bar is the winner of the plain rule.
 * Proof: let d be no candidate, and i a step of the run.  d is not drawn in the run, so taken[d]
 * stays the same.  weight[d] * i <= weight[d] * last, and rounding keeps the order of two numbers,
 * so the same holds for the rounded products, and for the rounded differences with taken[d].  Hence
 * lag of d at i <= lag of d at last < bar <= lag of the winner: d loses, and there is no tie.
 *
 * Where the best candidate is below the bar, the run ends before this sample, and the next bar is
 * set below the lag of that candidate.  The true winner lags at least as much, so it is a candidate
 * of the next run.  The bar is a margin below the last lag that was looked at.  The margin shrinks
 * with each run that reached its end, and grows with each that did not.
 *
 * Equal datasets: of those with one weight and one count the first R are candidates enough, as each
 * of them comes before the others until it is drawn.
 *
 * Cost: with more than FEW datasets less than sqrt(D) steps for each sample, instead of D (1024
 * datasets: 0.1 us, not 0.6).  Only weights that are almost equal, but not quite, cost up to D.
 */
enum { LANES = 4, FEW = 32 };     /* up to FEW datasets are one run, and all of them candidates */

typedef struct {
    Py_ssize_t count;   /* datasets; LANES places of padding follow, whose lag is -infinity */
    double *weight;     /* per sample */
    double *taken;      /* samples drawn so far; infinity once the dataset is used up */
} Datasets;

typedef struct {
    Datasets all, candidates;
    double *limit;                  /* samples that a dataset has; infinity if it has no end */
    int16_t *number;                /* which dataset a candidate is */
    char *dataset_index;            /* (size,) int16, which dataset sample i comes from */
    char *dataset_sample_index;     /* (size,) int64, which sample of that dataset it is */
    Py_ssize_t size;
} Blend;

/* Sets *top to the largest lag, and returns the first place that has it.  One running maximum would
 * wait for each comparison in turn, so there are LANES of them, and none waits for another. */
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
        ;       /* if no other has it, the last one has: nothing behind it is read */
    return d;
}

/* Copies those datasets that reach the bar at step last.  Each dataset is written behind the ones
 * that were picked, and n grows by one only if it is picked too: there is no branch that could be
 * mispredicted. */
static void pick_candidates(Blend *b, double last, double bar, Py_ssize_t run)
{
    Datasets *some = &b->candidates;
    double weight = -1.0, taken = -1.0;
    Py_ssize_t n = 0, same = 0;             /* same: equal datasets in a row before this one */

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
    double bar = -DBL_MAX, margin = 1.0, top = 0.0;     /* -DBL_MAX: any lag but -infinity */
    Py_ssize_t i = 0, run = 1;

    while (run * run < 4 * b->all.count)
        run++;
    if (b->all.count <= FEW)
        run = b->size;
    if (b->all.count == 1)                              /* it wins, whatever its lag */
        for (; i < b->size; i++) {
            PUT(int16_t, b->dataset_index, i, 0);
            PUT(int64_t, b->dataset_sample_index, i, i);
        }
    while (i < b->size) {
        const Py_ssize_t end = run < b->size - i ? i + run : b->size;

        pick_candidates(b, (double)(end > 2 ? end - 1 : 1), bar, run);
        for (; i < end; i++) {
            const Py_ssize_t place = find_top(&b->candidates, (double)(i > 1 ? i : 1), &top);
            const Py_ssize_t d = b->number[place];
            const double taken = b->all.taken[d];

            if (top < bar)
                break;
            PUT(int16_t, b->dataset_index, i, d);
            PUT(int64_t, b->dataset_sample_index, i, taken);    /* exact: below 2**53 */
            b->all.taken[d] = taken + 1.0 < b->limit[d] ? taken + 1.0 : INFINITY;
            b->candidates.taken[place] = b->all.taken[d];
        }
        margin *= i == end ? 0.9 : 1.5;
        margin = margin > 1e-5 ? margin : 1e-5;
        bar = top - margin > -DBL_MAX ? top - margin : -DBL_MAX;
    }
}

/* Checks the datasets: no lag is NaN, and they have samples enough, so the blend has an end. */
static int check_datasets(Blend *b)
{
    double room = 0.0;

    for (Py_ssize_t d = 0; d < b->all.count; d++) {
        const double weight = b->all.weight[d];

        if (!(weight >= 0.0 && weight <= 1e288)) {      /* times a step it stays finite */
            PyErr_Format(PyExc_ValueError, "weights[%zd]: wanted a finite number, at least 0", d);
            return -1;
        }
        b->all.taken[d] = b->limit[d] > 0.0 ? 0.0 : INFINITY;
        room += b->limit[d];
    }
    if (room >= (double)b->size)
        return 0;
    PyErr_SetString(PyExc_ValueError, "limits: wanted a sum of at least size");
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
    Py_ssize_t count, size, places;
    double *memory = NULL;
    Blend b;

    if (!PyArg_ParseTuple(args, "OOOOn:build_blend", o, o + 1, o + 2, o + 3, &size))
        return NULL;
    if (borrow_all(o, arrays, view, 4) < 0)
        goto exit;
    count = weights->shape[0];
    if (check_range("items of weights", count, 1, INT16_MAX - 1) < 0 ||
        check_range("items of limits", limits->shape[0], count, count) < 0 ||
        check_range("size", size, 0, LLONG_MAX) < 0 ||
        check_range("items of dataset_index", view[0].shape[0], size, LLONG_MAX) < 0 ||
        check_range("items of dataset_sample_index", view[1].shape[0], size, LLONG_MAX) < 0)
        goto exit;
    places = count + LANES;
    memory = PyMem_Calloc((size_t)places, 5 * sizeof(double) + sizeof(int16_t));
    if (!memory) {
        PyErr_NoMemory();
        goto exit;
    }
    b = (Blend){{count, memory, memory + places}, {0, memory + 2 * places, memory + 3 * places},
                memory + 4 * places, (int16_t *)(memory + 5 * places), view[0].buf, view[1].buf,
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
 * Definition: GPTDataset.__getitem__ in megatron_min.py; a batch is its samples, stacked.
 * Upstream: GPTDataset.__getitem__, and the collation of a batch.
 *
 *     stream          a a a a b b b c c c c c c      S = 4, x = 1
 *     sample_index            ^       ^              row 1 is (1, 0) and row 2 is (2, 1): sample 1
 *     pieces                  b b b c c              goes on up to (2, 1 + x)
 *     tokens                  b b b c                all but the last
 *     labels                    b b c c              the same, one to the left
 *     position_ids            0 1 2 3                by documents: 0 1 2 0
 *     cu_seqlens              0     3 4 4 4          by documents: starts of pieces, then S
 *
 * Every number that is read from an array is checked before it is used as a place in memory.  A
 * wrong number in shuffle_index, sample_index, document_index or the .idx ends the loop; then the
 * definition runs, and raises the error.
 *
 * Cost: each piece is read once, and 28 bytes are written for each token.  The tokens of a sample
 * are looked at again only for eod, a mask, padding, or a pad id that real tokens may have.
 */
enum {      /* the arrays; those in front of PLACES are written */
    TOKENS, LABELS, LOSS_MASK, POSITIONS, CU_SEQLENS, MAX_SEQLEN, MASK, PLACES, WANTED, ITEMS,
    POINTERS, LENGTHS, DOCUMENTS, ROWS, SHUFFLE, ARRAYS
};

static const Array batch_arrays[ARRAYS] = {
    {"tokens", "i8", 2, WRITE}, {"labels", "i8", 2, WRITE}, {"loss_mask", "f4", 2, WRITE},
    {"position_ids", "i8", 2, WRITE}, {"cu_seqlens", "i4", 2, WRITE_OR_NONE},
    {"max_seqlen", "i4", 1, WRITE_OR_NONE}, {"attention_mask", "b1", 4, WRITE_OR_NONE},
    {"places", "i8", 1, READ}, {"wanted", "i8", 1, READ}, {"items", "u1 i1 u2 i2 i4 i8", 1, READ},
    {"pointers", "i8", 1, READ}, {"lengths", "i4", 1, READ}, {"document_index", "i4", 1, READ},
    {"sample_index", "i4 i8", 2, READ}, {"shuffle_index", "u4 i8", 1, READ},
};

typedef struct {
    Py_buffer array[ARRAYS];
    int64_t batch, length;                  /* B, S */
    long long extra, pad, eod;              /* x, ids */
    int by_eod, by_document, mask_loss, reset_mask, look;   /* look: look_again at all samples? */
    char code[3];                           /* dtype of ITEMS */
} Batch;

#define item_of(view, i) load((view)->buf, i, (view)->itemsize)

/* A loop for one dtype. */
#define WIDEN_FROM(dtype, type) \
    if (code[0] == (dtype)[0] && code[1] == (dtype)[1]) \
        for (int64_t i = 0; i < n; i++) { \
            type item; \
            memcpy(&item, from + i * (int64_t)sizeof item, sizeof item); \
            PUT(int64_t, to, i, item); \
        }

/* Stores n tokens of a corpus, whose dtype is code, as int64. */
static void widen(char *to, const char *from, const char code[3], int64_t n)
{
    WIDEN_FROM("u1", uint8_t) WIDEN_FROM("i1", int8_t) WIDEN_FROM("u2", uint16_t)
    WIDEN_FROM("i2", int16_t) WIDEN_FROM("i4", int32_t) WIDEN_FROM("i8", int64_t)
}

/* Writes first, first + step, ... at the places start .. end - 1. */
INLINE void count_up(char *to, int64_t start, int64_t end, int64_t first, int64_t step)
{
    for (int64_t i = start; i < end; i++, first += step)
        PUT(int64_t, to, i, first);
}

/* Writes the tokens between rows j and j + 1 of sample_index, piece by piece, and what depends on
 * where pieces start.  Returns the number of tokens, or -1 if a number leads to no place. */
static int64_t read_pieces(const Batch *b, char *const row[], int64_t j)
{
    const Py_buffer *array = b->array, *items = &array[ITEMS];
    const int64_t length = b->length, width = items->itemsize;
    int64_t at = 0, start = 0, longest = 0, documents = 0;  /* start: of the present document */
    int64_t edge[4];                                        /* first, its begin, last, its end */

    for (int k = 0; k < 4; k++)
        edge[k] = item_of(&array[ROWS], 2 * j + k);
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
        if (n > room)                                       /* the extra token is no input */
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

/* Goes over a sample once more: restarts positions after eod, fills in the masks, and makes pads
 * 0. */
static void look_again(const Batch *b, char *const row[])
{
    char *tokens = row[TOKENS], *labels = row[LABELS];
    const int64_t length = b->length, pad = b->pad, eod = b->eod;
    int64_t start = 0;

    for (int64_t i = 0; i < length; i++) {
        const int64_t token = load(tokens, i, 8), label = load(labels, i, 8);

        if (row[MASK]) {                            /* 1 where row i may not attend */
            const int64_t past = b->reset_mask ? start : 0;
            memset(row[MASK] + i * length, 1, (size_t)length);
            memset(row[MASK] + i * length + past, 0, (size_t)(i + 1 - past));
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

/* Writes all samples that are wanted.  Fails if a number leads to no place. */
static int read_batch(const Batch *b)
{
    const Py_buffer *array = b->array, *shuffle = &array[SHUFFLE];
    const int64_t length = b->length, samples = array[ROWS].shape[0] - 1;
    char *row[PLACES] = {NULL};

    for (int64_t r = 0; r < array[WANTED].shape[0]; r++) {
        const int64_t place = item_of(&array[PLACES], r), wanted = item_of(&array[WANTED], r);
        const int64_t k = wanted < 0 ? wanted + samples : wanted;   /* as Python counts */
        int64_t j, size;

        if (place < 0 || place >= b->batch || k < 0 || k >= samples || k >= shuffle->shape[0])
            return -1;
        for (int a = 0; a < PLACES; a++)
            if (array[a].obj)
                row[a] = (char *)array[a].buf + place * (array[a].len / b->batch);
        j = shuffle->itemsize == 4 ? (uint32_t)item_of(shuffle, k) : item_of(shuffle, k);
        if (j < 0 || j >= array[ROWS].shape[0] - 1)
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
        if (b->look || size <= length)
            look_again(b, row);
    }
    return 0;
}

static int check_batch(const Batch *b)
{
    const Py_buffer *array = b->array;
    const int64_t B = b->batch, S = b->length, items[PLACES] = {S, S, S, S, S + 1, 1, S * S};

    for (int k = 0; k < PLACES; k++)
        if (array[k].obj &&
            (check_range(batch_arrays[k].name, array[k].shape[0], B, B) < 0 ||
             (B && check_range(batch_arrays[k].name, array[k].len / array[k].itemsize / B,
                               items[k], items[k]) < 0)))
            return -1;
    if (check_range("add_extra_token", b->extra, 0, 1) < 0 ||
        check_range("arrays for max_seqlen", array[MAX_SEQLEN].obj != NULL, b->by_document,
                    b->by_document) < 0 ||
        check_range("items of places", array[PLACES].shape[0], array[WANTED].shape[0],
                    array[WANTED].shape[0]) < 0 ||
        check_range("items of pointers", array[POINTERS].shape[0], array[LENGTHS].shape[0],
                    LLONG_MAX) < 0 ||
        check_range("columns of sample_index", array[ROWS].shape[1], 2, 2) < 0)
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
    b.look = b.by_eod || b.mask_loss || b.array[MASK].obj || b.code[0] == 'i' ||
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

/* megatron_min.py wants this number (_VERSION_OF_C in its section 18), and else goes without C.
 * Change both when a function comes or goes, or its arguments or its results change. */
enum { VERSION = 2 };

static PyMethodDef methods[] = {
    {"build_sample_idx", build_sample_idx, METH_VARARGS,
     "build_sample_idx($module, sample_index, sizes, document_index, sequence_length,\n"
     "                 add_extra_token, last_token, /)\n--\n\n"
     "Fill in sample_index; the last sample ends before token last_token of the stream."},
    {"shuffle", shuffle, METH_VARARGS,
     "shuffle($module, array, key, pos, /)\n--\n\n"
     "Shuffle array as a RandomState of this key and pos does; change key, return the new pos."},
    {"build_blend", build_blend, METH_VARARGS,
     "build_blend($module, dataset_index, dataset_sample_index, weights, limits, size, /)\n--\n\n"
     "Fill in two arrays; dataset d has limits[d] samples."},
    {"read_samples", read_samples, METH_VARARGS,
     "read_samples($module, tokens, labels, loss_mask, position_ids, cu_seqlens, max_seqlen,\n"
     "             attention_mask, places, wanted, items, pointers, lengths, document_index,\n"
     "             sample_index, shuffle_index, extra, pad, eod, by_eod, mask_loss,\n"
     "             reset_mask, /)\n--\n\n"
     "Fill in the first seven arrays; return whether each number led to a place."},
    {NULL, NULL, 0, NULL},
};

/* Fails if the compiler fused multiply-adds, which round once: a lag of section 4 would then be
 * another one.  With e = 2**-52 the product (1 + e) * (1 - e) is 1 - e * e, and rounded it is 1. */
static int begin(PyObject *module)
{
    const volatile double weight = 1.0 + DBL_EPSILON, step = 1.0 - DBL_EPSILON, taken = 1.0;

    if (weight * step - taken == 0.0)           /* volatile: computed here, not by the compiler */
        return PyModule_AddIntConstant(module, "VERSION", VERSION);
    PyErr_SetString(PyExc_ImportError, "_megatron_min was built with fused multiply-adds, which "
                    "change blends: build it with -ffp-contract=off");
    return -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, begin}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_megatron_min",
    .m_doc = "The slow loops of megatron_min.py, in C.", .m_methods = methods, .m_slots = slots,
};      /* no Py_mod_gil: not yet run on a free-threaded Python, which then turns its GIL on */

PyMODINIT_FUNC PyInit__megatron_min(void)
{
    return PyModuleDef_Init(&definition);
}
