/* The part of XLA's FFI interface that anymax_xla() uses, declared here again, so that the library compiles without XLA's
 * headers. This part has had the same layout from version 0.1 (jaxlib 0.6) on; the tests compare these declarations with
 * the headers of the jaxlib that is installed. Every structure that XLA passes begins with its own size.
 */
#ifndef ANYMAX_XLA_FFI_ABI_H
#define ANYMAX_XLA_FFI_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { XLA_MAJOR = 0, XLA_OLDEST = 1, XLA_MINOR = 3 }; /* these declarations were compared with versions 0.1 to 0.3 */

/* The element types, stages, error codes and kinds of items that occur here. */
enum { XLA_S32 = 4, XLA_S64 = 5, XLA_F16 = 10, XLA_F32 = 11, XLA_F64 = 12, XLA_BF16 = 16 };
enum { XLA_EXECUTE = 3 };
enum { XLA_INVALID_ARGUMENT = 3, XLA_INTERNAL = 13 };
enum { XLA_IS_BUFFER = 1, XLA_IS_SCALAR = 3, XLA_IS_METADATA = 1 };

typedef struct xla_error xla_error;     /* XLA's own; the receiver frees it */
typedef struct xla_context xla_context; /* of one execution */

typedef struct xla_extension {
    size_t size;
    int32_t type;
    struct xla_extension *next;
} xla_extension;

typedef struct {
    size_t size;
    xla_extension *extensions;
    int32_t major, minor;
} xla_version;

/* An operand or a result, dense and row-major. */
typedef struct {
    size_t size;
    xla_extension *extensions;
    int32_t dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} xla_buffer;

/* The operands, and the results: `items[i]` is an xla_buffer where `types[i]` is XLA_IS_BUFFER. */
typedef struct {
    size_t size;
    xla_extension *extensions;
    int64_t count;
    int32_t *types;
    void **items;
} xla_list;

typedef struct {
    const char *text; /* not terminated */
    size_t length;
} xla_text;

/* An attribute of type XLA_IS_SCALAR. */
typedef struct {
    int32_t dtype;
    void *value;
} xla_scalar;

/* Attributes, sorted by name. */
typedef struct {
    size_t size;
    xla_extension *extensions;
    int64_t count;
    int32_t *types;
    xla_text **names;
    void **items;
} xla_attributes;

typedef struct {
    size_t size;
    xla_extension *extensions;
    const char *message; /* copied */
    int32_t code;
} xla_error_args;

typedef struct {
    size_t size;
    xla_extension *extensions;
    xla_error *error;
} xla_error_destroy_args;

/* task(data) on some thread of XLA's, at some later time, or never where it has no thread. */
typedef struct {
    size_t size;
    xla_extension *extensions;
    xla_context *context;
    void (*task)(void *data);
    void *data;
} xla_schedule_args;

typedef struct {
    size_t size;
    xla_extension *extensions;
    xla_context *context;
    int64_t *count;
} xla_threads_args;

typedef void (*xla_unused)(void);

/* The functions that XLA lends. */
typedef struct {
    size_t size;
    xla_extension *extensions;
    xla_version version;
    const void *internal;
    xla_error *(*error_create)(xla_error_args *);
    xla_unused error_message;
    void (*error_destroy)(xla_error_destroy_args *);
    xla_unused others[8]; /* registration, streams, states, device memory */
    xla_error *(*schedule)(xla_schedule_args *);
    xla_error *(*threads)(xla_threads_args *);
} xla_api;

/* One call. At registration XLA calls with the extension XLA_IS_METADATA, to be told version and traits. */
typedef struct {
    size_t size;
    xla_extension *extensions;
    const xla_api *api;
    xla_context *context;
    int32_t stage;
    xla_list operands, results;
    xla_attributes attributes;
} xla_call;

/* XLA's own may be longer; the rest stays as XLA has initialised it. */
typedef struct {
    size_t size;
    xla_version version;
    uint32_t traits;
} xla_metadata;

typedef struct {
    xla_extension base;
    xla_metadata *metadata;
} xla_metadata_extension;

#ifdef __cplusplus
}
#endif
#endif
