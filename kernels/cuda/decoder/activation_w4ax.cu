/*
 * Activation and quantization for w4ax linears with BLOCK scales and inputs in channel order: a
 * half warp per channel block, 8 channels per lane (w4ax/quantize_rows.cuh).
 *
 * Reference  the kernels of activation.cu and w4ax/quantize_rows.cu, bit for bit
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/activation.cuh"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/w4ax/quantize_rows.cuh"

enum { ACT_W4AX_THREADS = 256, ACT_W4AX_BLOCKS = ACT_W4AX_THREADS / 16 };

struct activation_w4ax_args {
    qtool_decoder_activation activation;
    quantize_args quantize;
};

static __device__ __forceinline__ void load_4_halves(float v[4], const __half *from)
{
    const uint2 words = *(const uint2 *)from;
    to_floats<false>(v, (const uint32_t *)&words, 4);
}

template <qtool_decoder_act ACT>
static __global__ void __launch_bounds__(ACT_W4AX_THREADS)
    activation_w4ax_kernel(const __grid_constant__ activation_w4ax_args args)
{
    const qtool_decoder_activation &a = args.activation;
    const int block = (int)blockIdx.y * ACT_W4AX_BLOCKS + (int)threadIdx.x / 16;
    const size_t token = blockIdx.x;
    round_state<1, 1> state;
    float v[1][8], up[4];
    ptx_launch_dependents();
    if (block >= args.quantize.blocks_n) /* whole warps, as their number is even */
        return;
    state.open_block(args.quantize, block, (int)token);
    ptx_wait_previous();
    const float factor = token_factor(a, token);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int i = block * COLS + first_channel() + 16 * h;
        float *gate = v[0] + 4 * h;
        load_4_halves(gate, (const __half *)a.gate + token * a.gate_stride + i);
        load_4_halves(up, a.up ? (const __half *)a.up + token * a.up_stride + i
                               : (const __half *)a.gate + token * a.gate_stride + i);
#pragma unroll
        for (int j = 0; j < 4; j++)
            gate[j] = __half2float(to_half(act_value<ACT>(a, gate[j], up[j], i + j, factor)));
    }
    if (args.quantize.rotate)
        rotate_block<true>(v[0], COLS);
    quantize_block<1>(args.quantize, iteration_state<1>{{}, 1, 0, (int)token, 1}, state, v);
}

int qt_decoder_activation_w4ax(const struct qtool_decoder_activation *a, bool dependent,
                               void *stream)
{
    static void (*const kernels[])(activation_w4ax_args) = {
        activation_w4ax_kernel<QTOOL_DECODER_SILU>,
        activation_w4ax_kernel<QTOOL_DECODER_GELU_TANH>,
        activation_w4ax_kernel<QTOOL_DECODER_GELU>,
        activation_w4ax_kernel<QTOOL_DECODER_RELU>,
        activation_w4ax_kernel<QTOOL_DECODER_RELU2>,
        activation_w4ax_kernel<QTOOL_DECODER_SIGMOID>,
        activation_w4ax_kernel<QTOOL_DECODER_CLAMPED>};
    struct activation_w4ax_args args = {};
    struct qt_kernel_launch l = {};
    const struct qtool_w4ax_input *in = a->w4ax;
    args.activation = *a;
    if (a->act > QTOOL_DECODER_CLAMPED || in->scales != QTOOL_W4AX_BLOCK || in->perm ||
        in->k != a->n || a->n % (2 * COLS) || a->gate_stride % 4 || (size_t)a->gate % 8 ||
        (a->up && (a->up_stride % 4 || (size_t)a->up % 8)) ||
        qt_w4ax_quantize_args(&args.quantize, &a->acts, in, a->m) != QTOOL_OK)
        return QTOOL_UNSUPPORTED;
    l.kernel = (const void *)kernels[a->act];
    l.grid = dim3((unsigned)a->m,
                  (unsigned)((args.quantize.blocks_n + ACT_W4AX_BLOCKS - 1) / ACT_W4AX_BLOCKS));
    l.threads = ACT_W4AX_THREADS;
    l.dependent = l.most_smem = dependent;
    return qt_launch_kernel(&l, &args, stream);
}
