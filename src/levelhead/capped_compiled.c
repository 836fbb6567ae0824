/* Attention with capped scores in float32, forward and backward: capped_compiled.py calls it.

   The score of a query and a key is cap * tanh(scale q.k / cap) = 2 cap level - cap, where
       level = 1 / (1 + 2^(band q.k)),  band = -2 scale log2(e) / cap,  from 0 to 1
   and the constant drops out of the softmax. With slope = 2 cap log2(e),
       weight = 2^(slope (level - top) - log_total).
   Scores live in tiles of QUERIES x KEYS that stay in a core's second cache. Heads are shared out
   to threads one by one; what is summed, and in which order, depends on no thread. */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, VECTORS = 4 };
#else
enum { LANES = 8, VECTORS = 2 };
#endif
enum {
    ROWS = 6,      /* ROWS x VECTORS sums fill the registers */
    DEPTH = 64,    /* of a product at a time: its right side stays in the first cache */
    PANEL = 64,    /* keys that lie side by side, for the products along the width of a head */
    ALIGNMENT = 16, /* widths are filled up to a multiple */
    QUERIES = 192,
    KEYS = 256
};

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

/* Rows of a width without gaps; strides in floats. */
typedef struct {
    float *data;
    int64_t sample, head, row;
} Rows;

/* Whether a query may attend to a key, a byte each; strides in bytes, 0 along axes of one. */
typedef struct {
    const uint8_t *data;
    int64_t sample, head, row;
} Mask;

typedef struct {
    int64_t num_samples, num_heads, num_queries, num_keys, width, value_width, is_causal;
    float band, slope, factor; /* factor: of the gradients of query and key */
    Rows query, key, value, output, grad_output, grad_query, grad_key, grad_value;
    Mask mask;                /* data may be NULL */
    const float *sink_level;  /* [heads], or NULL */
    float *top, *log_total;   /* [samples, heads, queries]: the highest level, log2 of the sum */
    const float *moved;       /* likewise: gradient of the output times the output */
} Call;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

/* C = A B, or C += A B: so many rows, VECTORS or one vector of columns. */
INLINE void block(const int rows, const int vectors, const int adds, int64_t depth, const float *a,
                  int64_t a_row, int64_t a_column, const float *b, int64_t b_row, float *c,
                  int64_t c_row) {
    vector sum[ROWS][VECTORS];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++)
            sum[i][j] = adds ? *(const vector *)(c + i * c_row + j * LANES) : (vector){0};
    for (int64_t k = 0; k < depth; k++) {
        vector right[VECTORS];
        for (int j = 0; j < vectors; j++) right[j] = *(const vector *)(b + k * b_row + j * LANES);
        for (int i = 0; i < rows; i++) {
            float left = a[i * a_row + k * a_column];
            for (int j = 0; j < vectors; j++) sum[i][j] += left * right[j];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) *(vector *)(c + i * c_row + j * LANES) = sum[i][j];
}

INLINE void strip(const int vectors, const int adds, int64_t rows, int64_t depth, const float *a,
                  int64_t a_row, int64_t a_column, const float *b, int64_t b_row, float *c,
                  int64_t c_row) {
    int64_t i = 0;
#define BLOCKS(size)                                                                            \
    for (; i + (size) <= rows; i += (size))                                                     \
    block(size, vectors, adds, depth, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row)
    BLOCKS(ROWS);
    BLOCKS(2);
    BLOCKS(1);
#undef BLOCKS
}

/* C = A B, or C += A B. A may lie in any order; the columns of B and C are dense, and a multiple
   of ALIGNMENT. */
INLINE void multiply(const int adds, int64_t rows, int64_t columns, int64_t depth, const float *a,
                     int64_t a_row, int64_t a_column, const float *b, int64_t b_row, float *c,
                     int64_t c_row) {
    for (int64_t k = 0; k < depth; k += DEPTH) {
        int64_t some = smaller(DEPTH, depth - k), j = 0;
        const float *left = a + k * a_column, *right = b + k * b_row;
#define STRIPS(vectors)                                                                         \
    for (; j + (vectors) * LANES <= columns; j += (vectors) * LANES)                            \
        if (adds || k)                                                                          \
            strip(vectors, 1, rows, some, left, a_row, a_column, right + j, b_row, c + j, c_row); \
        else                                                                                    \
            strip(vectors, 0, rows, some, left, a_row, a_column, right + j, b_row, c + j, c_row)
        STRIPS(VECTORS);
        STRIPS(1);
#undef STRIPS
    }
}

static void product(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row,
                    const float *b, int64_t b_row, float *c, int64_t c_row) {
    multiply(0, rows, columns, depth, a, a_row, 1, b, b_row, c, c_row);
}

static void add_product(int64_t rows, int64_t columns, int64_t depth, const float *a,
                        int64_t a_row, int64_t a_column, const float *b, int64_t b_row, float *c,
                        int64_t c_row) {
    multiply(1, rows, columns, depth, a, a_row, a_column, b, b_row, c, c_row);
}

/* 2^x within 1e-7 of itself: 0 below the smallest normal number, NaN of NaN. */
INLINE float power(float x) {
    float held = x < -126.0f ? -126.0f : x;
    held = held > 127.0f ? 127.0f : held;
    float whole = rintf(held), rest = held - whole;
    float sum = 1.5403530e-4f; /* the series of 2^rest, from its end */
    sum = sum * rest + 1.3333558e-3f;
    sum = sum * rest + 9.6181291e-3f;
    sum = sum * rest + 5.5504109e-2f;
    sum = sum * rest + 2.4022651e-1f;
    sum = sum * rest + 6.9314718e-1f;
    sum = sum * rest + 1.0f;
    union {
        int32_t bits;
        float value;
    } scale = {.bits = ((int32_t)whole + 127) << 23};
    return x < -126.0f ? 0.0f : sum * scale.value;
}

/* Copy rows to rows of a padded width; zeros up to num_padded rows. */
static void pack(const float *from, int64_t stride, int64_t num_rows, int64_t num_padded,
                 int64_t width, float *to) {
    int64_t padded = up(width, ALIGNMENT);
    for (int64_t i = 0; i < num_rows; i++) {
        memcpy(to + i * padded, from + i * stride, width * sizeof(float));
        memset(to + i * padded + width, 0, (padded - width) * sizeof(float));
    }
    memset(to + num_rows * padded, 0, (num_padded - num_rows) * padded * sizeof(float));
}

/* Copy rows to columns, in panels [width][PANEL]; zeros up to the end of the last panel. */
static void pack_columns(const float *from, int64_t stride, int64_t num_rows, int64_t width,
                         float *to) {
    for (int64_t first = 0; first < num_rows; first += PANEL, to += width * PANEL) {
        int64_t some = smaller(PANEL, num_rows - first);
        if (some < PANEL) memset(to, 0, width * PANEL * sizeof(float));
        for (int64_t i = 0; i < some; i++)
            for (int64_t d = 0; d < width; d++)
                to[d * PANEL + i] = from[(first + i) * stride + d];
    }
}

/* The first query, counted from `queries`, that sees a key. */
static int64_t first_seeing(const Call *call, int64_t queries, int64_t key) {
    int64_t past = call->num_keys - call->num_queries, first = key - past - queries;
    return call->is_causal && first > 0 ? first : 0;
}

/* How many keys from the first one the causal rule lets a query see, of so many. */
static int64_t num_seen(const Call *call, int64_t query, int64_t first_key, int64_t most) {
    int64_t past = call->num_keys - call->num_queries, seen = past + query + 1 - first_key;
    return !call->is_causal || seen > most ? most : (seen > 0 ? seen : 0);
}

static const uint8_t *mask_row(const Call *call, int64_t sample, int64_t head, int64_t query,
                               int64_t key) {
    const Mask *mask = &call->mask;
    if (!mask->data) return NULL;
    return mask->data + sample * mask->sample + head * mask->head + query * mask->row + key;
}

static float *head_of(const Rows *rows, int64_t sample, int64_t head) {
    return rows->data + sample * rows->sample + head * rows->head;
}

/* Turn a row of products into weights from the highest level on; return their sum. */
static float weigh(const Call *call, float *row, int64_t seen, int64_t wide, const uint8_t *mask,
                   float *top) {
    float band = call->band, slope = call->slope, highest = *top, sum = 0.0f;
    for (int64_t j = 0; j < seen; j++) row[j] = 1.0f / (1.0f + power(band * row[j]));
    if (mask)
        for (int64_t j = 0; j < seen; j++) row[j] = mask[j] ? row[j] : -INFINITY;
#pragma omp simd reduction(max : highest)
    for (int64_t j = 0; j < seen; j++) highest = row[j] > highest ? row[j] : highest;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < seen; j++) {
        float weight = power(slope * (row[j] - highest));
        row[j] = weight;
        sum += weight;
    }
    for (int64_t j = seen; j < wide; j++) row[j] = 0.0f;
    *top = highest;
    return sum;
}

static void attend(const Call *call, int64_t sample, int64_t head, float *room) {
    int64_t width = call->width, value_width = up(call->value_width, ALIGNMENT);
    int64_t num_keys = call->num_keys, padded = up(num_keys, PANEL);
    float *key = room, *value = key + padded * width, *query = value + padded * value_width;
    float *scores = query + QUERIES * up(width, ALIGNMENT), *sums = scores + QUERIES * KEYS;
    int64_t query_width = up(width, ALIGNMENT), index = sample * call->num_heads + head;
    float *top = call->top + index * call->num_queries;
    float *log_total = call->log_total + index * call->num_queries;
    pack_columns(head_of(&call->key, sample, head), call->key.row, num_keys, width, key);
    pack(head_of(&call->value, sample, head), call->value.row, num_keys, padded, call->value_width,
         value);
    for (int64_t start = 0; start < call->num_queries; start += QUERIES) {
        int64_t num_rows = smaller(QUERIES, call->num_queries - start);
        int64_t stop = num_seen(call, start + num_rows - 1, 0, num_keys);
        float total[QUERIES];
        for (int64_t i = 0; i < num_rows; i++) {
            top[start + i] = call->sink_level ? call->sink_level[head] : 0.0f;
            total[i] = call->sink_level ? 1.0f : 0.0f;
        }
        memset(sums, 0, num_rows * value_width * sizeof(float));
        pack(head_of(&call->query, sample, head) + start * call->query.row, call->query.row,
             num_rows, num_rows, width, query);
        for (int64_t tile = 0; tile < stop; tile += KEYS) {
            int64_t most = smaller(KEYS, stop - tile), wide = up(most, PANEL);
            for (int64_t p = 0; p < wide; p += PANEL) {
                int64_t first = first_seeing(call, start, tile + p);
                product(num_rows - first, PANEL, width, query + first * query_width, query_width,
                        key + (tile + p) * width, PANEL, scores + first * KEYS + p, KEYS);
            }
            for (int64_t i = 0; i < num_rows; i++) {
                int64_t seen = num_seen(call, start + i, tile, most);
                float before = top[start + i];
                const uint8_t *mask = mask_row(call, sample, head, start + i, tile);
                float sum = weigh(call, scores + i * KEYS, seen, wide, mask, top + start + i);
                if (top[start + i] != before) {
                    float kept = power(call->slope * (before - top[start + i]));
                    total[i] *= kept;
                    for (int64_t d = 0; d < value_width; d++) sums[i * value_width + d] *= kept;
                }
                total[i] += sum;
            }
            for (int64_t p = 0; p < wide; p += PANEL) {
                int64_t first = first_seeing(call, start, tile + p);
                add_product(num_rows - first, value_width, PANEL, scores + first * KEYS + p, KEYS,
                            1, value + (tile + p) * value_width, value_width,
                            sums + first * value_width, value_width);
            }
        }
        float *output = head_of(&call->output, sample, head) + start * call->output.row;
        for (int64_t i = 0; i < num_rows; i++) {
            /* less than one: a query that sees nothing */
            float all = total[i] < 0.5f ? 0.5f : total[i], share = 1.0f / all;
            log_total[start + i] = log2f(all);
            for (int64_t d = 0; d < call->value_width; d++)
                output[i * call->output.row + d] = share * sums[i * value_width + d];
        }
    }
}

/* Turn a row of products into weights, and one of their gradients into the products' own. */
static void change_row(const Call *call, float *row, float *change, int64_t seen, int64_t wide,
                       const uint8_t *mask, float top, float log_total, float moved) {
    float band = call->band, slope = call->slope;
#pragma omp simd
    for (int64_t j = 0; j < seen; j++) {
        float odds = power(band * row[j]), level = 1.0f / (1.0f + odds);
        float weight = power(slope * (level - top) - log_total);
        row[j] = weight;
        change[j] = (change[j] - moved) * weight * (odds * level * level);
    }
    if (mask)
        for (int64_t j = 0; j < seen; j++) {
            row[j] = mask[j] ? row[j] : 0.0f;
            change[j] = mask[j] ? change[j] : 0.0f;
        }
    for (int64_t j = seen; j < wide; j++) row[j] = change[j] = 0.0f;
}

static void put(const Rows *rows, int64_t sample, int64_t head, int64_t start, int64_t num_rows,
                int64_t width, const float *from, float factor) {
    int64_t padded = up(width, ALIGNMENT);
    float *to = head_of(rows, sample, head) + start * rows->row;
    for (int64_t i = 0; i < num_rows; i++)
        for (int64_t d = 0; d < width; d++) to[i * rows->row + d] = factor * from[i * padded + d];
}

static void differentiate(const Call *call, int64_t sample, int64_t head, float *room) {
    int64_t width = up(call->width, ALIGNMENT), value_width = up(call->value_width, ALIGNMENT);
    int64_t num_queries = call->num_queries, num_keys = call->num_keys;
    int64_t index = (sample * call->num_heads + head) * num_queries;
    float *query = room, *grad = query + num_queries * width;
    float *grad_query = grad + num_queries * value_width;
    float *key_columns = grad_query + num_queries * width, *value_columns = key_columns + KEYS * width;
    float *key = value_columns + KEYS * value_width, *grad_key = key + KEYS * width;
    float *grad_value = grad_key + KEYS * width, *scores = grad_value + KEYS * value_width;
    float *changes = scores + QUERIES * KEYS;
    const float *from_key = head_of(&call->key, sample, head);
    const float *from_value = head_of(&call->value, sample, head);
    pack(head_of(&call->query, sample, head), call->query.row, num_queries, num_queries,
         call->width, query);
    pack(head_of(&call->grad_output, sample, head), call->grad_output.row, num_queries,
         num_queries, call->value_width, grad);
    memset(grad_query, 0, num_queries * width * sizeof(float));
    for (int64_t tile = 0; tile < num_keys; tile += KEYS) {
        int64_t tile_keys = smaller(KEYS, num_keys - tile), padded = up(tile_keys, PANEL);
        pack_columns(from_key + tile * call->key.row, call->key.row, tile_keys, call->width,
                     key_columns);
        pack_columns(from_value + tile * call->value.row, call->value.row, tile_keys,
                     call->value_width, value_columns);
        pack(from_key + tile * call->key.row, call->key.row, tile_keys, padded, call->width, key);
        memset(grad_key, 0, padded * width * sizeof(float));
        memset(grad_value, 0, padded * value_width * sizeof(float));
        for (int64_t start = first_seeing(call, 0, tile); start < num_queries; start += QUERIES) {
            int64_t num_rows = smaller(QUERIES, num_queries - start);
            int64_t most = num_seen(call, start + num_rows - 1, tile, tile_keys);
            int64_t wide = up(most, PANEL);
            for (int64_t p = 0; p < wide; p += PANEL) {
                int64_t first = first_seeing(call, start, tile + p);
                product(num_rows - first, PANEL, call->width, query + (start + first) * width,
                        width, key_columns + p * call->width, PANEL, scores + first * KEYS + p,
                        KEYS);
                product(num_rows - first, PANEL, call->value_width,
                        grad + (start + first) * value_width, value_width,
                        value_columns + p * call->value_width, PANEL, changes + first * KEYS + p,
                        KEYS);
            }
            for (int64_t i = 0; i < num_rows; i++)
                change_row(call, scores + i * KEYS, changes + i * KEYS,
                           num_seen(call, start + i, tile, most), wide,
                           mask_row(call, sample, head, start + i, tile),
                           call->top[index + start + i], call->log_total[index + start + i],
                           call->moved[index + start + i]);
            for (int64_t p = 0; p < wide; p += PANEL) {
                int64_t first = first_seeing(call, start, tile + p), some = num_rows - first;
                const float *weight = scores + first * KEYS + p;
                const float *change = changes + first * KEYS + p;
                add_product(PANEL, value_width, some, weight, 1, KEYS,
                            grad + (start + first) * value_width, value_width,
                            grad_value + p * value_width, value_width);
                add_product(PANEL, width, some, change, 1, KEYS, query + (start + first) * width,
                            width, grad_key + p * width, width);
                add_product(some, width, PANEL, change, KEYS, 1, key + p * width, width,
                            grad_query + (start + first) * width, width);
            }
        }
        put(&call->grad_key, sample, head, tile, tile_keys, call->width, grad_key, call->factor);
        put(&call->grad_value, sample, head, tile, tile_keys, call->value_width, grad_value, 1.0f);
    }
    put(&call->grad_query, sample, head, 0, num_queries, call->width, grad_query, call->factor);
}

/* Floats that a thread works in. */
int64_t forward_room(const Call *call) {
    int64_t width = up(call->width, ALIGNMENT), value_width = up(call->value_width, ALIGNMENT);
    return up(call->num_keys, PANEL) * (width + value_width) +
           QUERIES * (width + value_width + KEYS);
}

int64_t backward_room(const Call *call) {
    int64_t width = up(call->width, ALIGNMENT), value_width = up(call->value_width, ALIGNMENT);
    return call->num_queries * (2 * width + value_width) + KEYS * (3 * width + 2 * value_width) +
           2 * QUERIES * KEYS;
}

/* Work through heads nobody has taken; every thread calls with room of its own. */
void forward(const Call *call, float *room, _Atomic int64_t *next) {
    int64_t all = call->num_samples * call->num_heads;
    for (int64_t i; (i = atomic_fetch_add(next, 1)) < all;)
        attend(call, i / call->num_heads, i % call->num_heads, room);
}

void backward(const Call *call, float *room, _Atomic int64_t *next) {
    int64_t all = call->num_samples * call->num_heads;
    for (int64_t i; (i = atomic_fetch_add(next, 1)) < all;)
        differentiate(call, i / call->num_heads, i % call->num_heads, room);
}
