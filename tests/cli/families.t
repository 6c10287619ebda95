# Families whose norms or layers are of several sizes.

# Norms of queries over all heads, wider than the hidden states.
$ qtool quantize $MODELS/olmo2_biased -o wide --scheme nf3:g=32,learn=1 --tune-norms --data $MODELS/olmo2_biased/ids.u16 --seqlen 8 -q
$ qtool verify wide -q
$ qtool eval wide --ref $MODELS/olmo2_biased --data $MODELS/olmo2_biased/ids.u16 --seqlen 8 -q
> KL

# Some layers without experts, an expert for all tokens, and a layer that is not run.
$ qtool quantize $MODELS/glm4_moe_groups -o some --strict --scheme nf4:g=32 --kv 4 --data $MODELS/glm4_moe_groups/ids.u16 --seqlen 8 -q
$ qtool verify some -q
$ qtool eval some --ref $MODELS/glm4_moe_groups --data $MODELS/glm4_moe_groups/ids.u16 --seqlen 8 --gate 'ppl_ratio<=1.2' -q
$ qtool inspect some
> model.layers.0.mlp.down_proj.weight .*method=gptq
> model.layers.1.mlp.shared_experts.down_proj.weight .*method=gptq
>! model.layers.3.*nf4
$ qtool plan $MODELS/glm4_moe_groups --scheme nf4
> model.layers.3.mlp.experts.0.down_proj.weight .*copied: predicts further tokens
> model.layers.3.shared_head.head.weight .*copied
