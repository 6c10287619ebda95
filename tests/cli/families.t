# Families whose norms or layers have different sizes.

# Norms of queries over all heads, larger than the hidden size.
$ qtool quantize $MODELS/olmo2_biased -o wide --scheme nf3:g=32,learn=1 --tune-norms --data $MODELS/olmo2_biased/ids.u16 --seqlen 8 -q
$ qtool verify wide -q
$ qtool eval wide --ref $MODELS/olmo2_biased --data $MODELS/olmo2_biased/ids.u16 --seqlen 8 -q
> KL

# Some layers without experts, a shared expert, and an MTP layer, which is not run.
$ qtool quantize $MODELS/glm4_moe_groups -o some --strict --scheme nf4:g=32 --kv 4 --data $MODELS/glm4_moe_groups/ids.u16 --seqlen 8 -q
$ qtool verify some -q
$ qtool eval some --ref $MODELS/glm4_moe_groups --data $MODELS/glm4_moe_groups/ids.u16 --seqlen 8 --gate 'ppl_ratio<=1.2' -q
$ qtool inspect some
> model.layers.0.mlp.down_proj.weight .*method=gptq
> model.layers.1.mlp.shared_experts.down_proj.weight .*method=gptq
>! model.layers.3.*nf4
$ qtool plan $MODELS/glm4_moe_groups --scheme nf4
> model.layers.3.mlp.experts.0.down_proj.weight .*copied: MTP layer
> model.layers.3.shared_head.head.weight .*copied

# A shared expert with a gate, and a layer without experts.
$ qtool quantize $MODELS/qwen2_moe_some_dense -o gated --strict --scheme fp6:e=2 --tensor '_proj=fp6:e=2' --data $MODELS/qwen2_moe_some_dense/ids.u16 --seqlen 8 -q
$ qtool verify gated -q
$ qtool eval gated --ref $MODELS/qwen2_moe_some_dense --data $MODELS/qwen2_moe_some_dense/ids.u16 --seqlen 8 --gate 'kld_mean<=0.1' -q
$ qtool inspect gated
> model.layers.0.mlp.shared_expert.down_proj.weight .*method=gptq
> model.layers.1.mlp.down_proj.weight .*method=gptq
$ qtool plan $MODELS/qwen2_moe --scheme nf4
> model.layers.0.mlp.shared_expert_gate.weight .*copied: router
> model.layers.0.mlp.gate.weight .*copied: router

# Experts in every second layer; the routing bias is a matrix with one row.
$ qtool quantize $MODELS/ernie4_5_moe_interval -o second --strict --scheme fp6:e=2 --tensor '_proj=fp6:e=2' --data $MODELS/ernie4_5_moe_interval/ids.u16 --seqlen 8 -q
$ qtool verify second -q
$ qtool eval second --ref $MODELS/ernie4_5_moe_interval --data $MODELS/ernie4_5_moe_interval/ids.u16 --seqlen 8 --gate 'kld_mean<=0.1' -q
$ qtool inspect second
> model.layers.0.mlp.down_proj.weight .*method=gptq
> model.layers.1.mlp.experts.3.down_proj.weight .*method=gptq

# Rotary embeddings of adjacent channels; fused gate and up; a norm after them.
$ qtool quantize $MODELS/glm4 -o rotary --strict --scheme nf4:g=32,learn=1 --tune-norms --data $MODELS/glm4/ids.u16 --seqlen 8 -q
$ qtool verify rotary -q
$ qtool inspect rotary
> model.layers.0.mlp.gate_up_proj.weight .*learn=1
$ qtool eval rotary --kv 4 --ref $MODELS/glm4 --data $MODELS/glm4/ids.u16 --seqlen 8 -q
> KL
$ qtool quantize $MODELS/ernie4_5 -o plain --strict --scheme w4ax --data $MODELS/ernie4_5/ids.u16 --seqlen 8 -q
$ qtool verify plain -q
$ qtool quantize $MODELS/glm_old_keys -o old --strict --scheme nf4:g=32 --data $MODELS/glm_old_keys/ids.u16 --seqlen 8 -q
$ qtool eval old --ref $MODELS/glm_old_keys --data $MODELS/glm_old_keys/ids.u16 --seqlen 8 -q
> KL
$ qtool list archs
> ^glm +attention
> ^glm4 +attention
> ^ernie4_5 +attention
> ^helium +attention

# Layers that are one mixer or one MLP; a state space model beside attention.
$ qtool quantize $MODELS/nemotron_h -o blocks --strict --scheme fp6:e=2 --tensor 'proj=fp6:e=2' --data $MODELS/nemotron_h/ids.u16 --seqlen 8 -q
$ qtool eval blocks --ref $MODELS/nemotron_h --data $MODELS/nemotron_h/ids.u16 --seqlen 8 --gate 'kld_mean<=0.03' -q
$ qtool inspect blocks
> backbone.layers.0.mixer.in_proj.weight .*method=gptq
> backbone.layers.1.mixer.o_proj.weight .*method=gptq
> backbone.layers.2.mixer.down_proj.weight .*method=gptq
> backbone.layers.3.mixer.shared_experts.up_proj.weight .*method=gptq
$ qtool quantize $MODELS/falcon_h1 -o beside --strict --scheme fp6:e=2 --tensor 'proj=fp6:e=2' --data $MODELS/falcon_h1/ids.u16 --seqlen 8 -q
$ qtool eval beside --ref $MODELS/falcon_h1 --data $MODELS/falcon_h1/ids.u16 --seqlen 8 --gate 'kld_mean<=0.005' -q
$ qtool inspect beside
> model.layers.0.mamba.out_proj.weight .*method=gptq
> model.layers.0.self_attn.o_proj.weight .*method=gptq

# Several hidden states of a token, a branch beside the mixer, and gates that are cut off; linears
# with adapters.
$ qtool quantize $MODELS/gemma3n -o altup --scheme fp6:e=2 --tensor 'layers.*(_proj|per_layer.*).weight=fp6:e=2' --data $MODELS/gemma3n/ids.u16 --seqlen 40 -q
$ qtool eval altup --ref $MODELS/gemma3n --data $MODELS/gemma3n/ids.u16 --seqlen 40 --gate 'kld_mean<=0.001' -q
$ qtool inspect altup
> model.layers.3.per_layer_projection.weight .*method=gptq
> model.layers.0.laurel.linear_left.weight +F16
$ qtool plan $MODELS/phi4mm --scheme nf4 --tensor self_attn=nf4 2>/dev/null
> model.layers.0.self_attn.qkv_proj.base_layer.weight .* nf4
$ qtool eval $MODELS/phi4mm --data $MODELS/phi4mm/ids.u16 --seqlen 40 -q
> perplexity

# Layers with a window have other heads, and values are narrower than keys; experts whose names
# differ from those of the shared expert, and matrices of sparse attention, which are not run.
$ qtool quantize $MODELS/mimo_v2_flash -o mimo --scheme fp6:e=2 --tensor '_proj=fp6:e=2' --data $MODELS/mimo_v2_flash/ids.u16 --seqlen 40 -q
$ qtool eval mimo --ref $MODELS/mimo_v2_flash --data $MODELS/mimo_v2_flash/ids.u16 --seqlen 40 --gate 'kld_mean<=0.1' -q
$ qtool quantize $MODELS/minimax_m3 -o m3 --scheme fp6:e=2 --tensor '(attn.[qkvo]|mlp.*|experts.*)(_proj|w[123]).weight=fp6:e=2' --data $MODELS/minimax_m3/ids.u16 --seqlen 40 -q
$ qtool inspect m3
> layers.1.block_sparse_moe.experts.3.w2.weight .*method=gptq
> layers.1.block_sparse_moe.shared_experts.down_proj.weight .*method=gptq
> layers.0.mlp.up_proj.weight .*method=gptq
$ qtool plan $MODELS/minimax_m3 --scheme nf4
> layers.1.self_attn.index_q_proj.weight .*copied: gate
$ qtool eval $MODELS/minimax_m3 --data $MODELS/minimax_m3/ids.u16 --seqlen 49 -q
? 2
2 exceed the model's 48 positions

# Attention within chunks: 4-bit caches of longer sequences are not simulated.
$ qtool eval $MODELS/llama4_chunks --data $MODELS/llama4_chunks/ids.u16 --seqlen 40 --kv 4 -q
? 4
2 llama4_chunks: 4-bit caches of sequences of 40 tokens, but 'attention_chunk_size' is 16

# A mixture of attention heads: queries and output projections of experts, which have their own
# Hessians.
$ qtool quantize $MODELS/jetmoe -o jetmoe --scheme fp6:e=2 --tensor '_proj=fp6:e=2' --data $MODELS/jetmoe/ids.u16 --seqlen 40 -q
$ qtool inspect jetmoe
> layers.1.self_attention.experts.3.q_proj.weight .*method=gptq
> layers.1.self_attention.experts.3.o_proj.weight .*method=gptq
> layers.1.self_attention.kv_proj.weight .*method=gptq
$ qtool eval jetmoe --ref $MODELS/jetmoe --data $MODELS/jetmoe/ids.u16 --seqlen 40 --gate 'kld_mean<=0.1' -q
$ qtool plan $MODELS/jetmoe --scheme nf4
> layers.1.self_attention.experts.router.layer.weight .*copied: router
$ qtool quantize $MODELS/jetmoe -o w4 --scheme w4ax --tensor '_proj=w4ax' --data $MODELS/jetmoe/ids.u16 --seqlen 40
? 4
2 w4ax does not support mixtures of attention heads
