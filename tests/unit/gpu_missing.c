/* What the CUDA backend also calls, but not where test_gpu_backend.c does: the linker wants it. Its
 * types are of no account, and its header is not included. */
#include <stdlib.h>

#define MISSING(name)                                                                              \
    void name(void);                                                                               \
    void name(void)                                                                                \
    {                                                                                              \
        abort();                                                                                   \
    }

MISSING(gpu_grad_activate)
MISSING(gpu_grad_decode)
MISSING(gpu_grad_loss)
MISSING(gpu_grad_norm_inputs)
MISSING(gpu_grad_norm_rows)
MISSING(gpu_grad_norm_weights)
MISSING(gpu_grad_scales)
MISSING(gpu_grad_square)
MISSING(gpu_grad_tune)
MISSING(gpu_attend)
MISSING(gpu_math_activate)
MISSING(gpu_math_add_f64)
MISSING(gpu_math_bias)
MISSING(gpu_math_channel_parts)
MISSING(gpu_math_channels)
MISSING(gpu_math_norm)
MISSING(gpu_math_rope)
MISSING(gpu_math_scatter)
MISSING(gpu_math_score)
MISSING(gpu_math_subtract)
