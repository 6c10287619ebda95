/* help recipes: which scheme for which budget and runtime. docs/recipes.md has the same rows. */
#include "cli/cli.h"

static const struct {
    const char *bits, *runtime, *scheme, *data, *format;
} recipes[] = {
    {"8", "vLLM, SGLang, transformers", "int8", "", "compressed-tensors"},
    {"8", "transformers, in FP8", "fp8:max=448", "", "compressed-tensors"},
    {"6", "vLLM 0.33 and later, SGLang", "fp6:e=2", "", "humming"},
    {"4.5", "llama.cpp, Ollama, LM Studio", "iq4nl", "--data", "gguf"},
    {"4.25", "MLX", "int4:g=64", "--data", "mlx"},
    {"4.13", "vLLM, SGLang, transformers", "int4", "--data", "compressed-tensors"},
    {"4.13", "transformers with bitsandbytes", "nf4", "--data", "bnb"},
    {"4.13", "transformers with qtool-torch", "nf4", "--data", "-"},
    {"3.13", "vLLM 0.33 and later", "int3", "--data", "humming"},
    {"3.13", "transformers with qtool-torch", "nf3", "--data", "-"},
};

int help_recipes(struct qt_err *err)
{
    struct table t = {.align = "rllll"};
    table_row(&t, "BITS\tRUNTIME\tSCHEME\tDATA\tEXPORT FORMAT");
    for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++)
        table_row(&t, "%s\t%s\t%s\t%s\t%s", recipes[i].bits, recipes[i].runtime, recipes[i].scheme,
                  recipes[i].data, recipes[i].format);
    const int rc = table_print(&t, err);
    fputs("\nBITS are those of quantized weights with scales, at the scheme's usual group size.\n"
          "--data FILE (text or conversations like those of the use) pays most at 4 bits and\n"
          "below. A row becomes\n\n"
          "  qtool quantize CKPT -o OUT --scheme SCHEME --data FILE\n"
          "  qtool eval OUT --data TEXT --ref CKPT\n"
          "  qtool export OUT -o DIR --format FORMAT\n\n"
          "--format dense takes every scheme to every runtime that loads the original, as large\n"
          "as the original. 'qtool plan CKPT' compares the sizes of all schemes, and 'qtool list\n"
          "exports' shows what each format holds.\n",
          stdout);
    return rc;
}
