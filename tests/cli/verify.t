$ qtool quantize "$NANO" -o nf4 --scheme nf4:g=64 -q

$ qtool verify nf4 -q
> ^TENSOR +SCHEME +SHAPE +BPW
> ^container +sound
> ^tensors +21 quantized, 8 copied$
>! sqnr_min
2-

$ qtool verify nf4 --source "$NANO" --gate 'bpw<=4.3,sqnr_min>=18,cosine_min>0.9,bytes<2e6' -q
> ^container +sound.*equal to its source
> ^sqnr_min +2[0-9]
> ^mse_max +

$ qtool verify nf4 --source "$NANO" --gate 'bpw<=4,sqnr_min>=18,cosine_min>=0.9999' -q
? 5
> ^container +sound
2 ^qtool verify: gate failed: bpw is 4\.[0-9]+, required <= 4; cosine_min is 0\.99[0-9]+, required >= 0\.9999$

# Per tensor, and what failed by name.
$ qtool verify nf4 --source "$NANO" --gate 'sqnr>=18,sqnr[.]>=18,bpw[mlp\.]<=4.3' -q
$ qtool verify nf4 --source "$NANO" --gate 'sqnr[layers\.1\.mlp\.up]>=90,bpw<=5' -q
? 5
2 gate failed: sqnr of model\.layers\.1\.mlp\.up_proj\.weight is 2[0-9.]+, required >= 90$
$ qtool verify nf4 --source "$NANO" --gate 'sqnr[lm_head]>=1' -q
? 2
2 gate: 'lm_head' matches no quantized tensor
# Which is found before the work.
$ cp -r nf4 lost && printf x | dd of=lost/model.safetensors bs=1 seek=200000 conv=notrunc 2>err && qtool verify lost --gate 'bpw[lm_head]<=5' -q
? 2
$ qtool verify nf4 --gate 'sqnr[.]>=1'
? 2
2 --gate 'sqnr\[\.\]>=1' needs --source
$ qtool verify nf4 --gate 'bpw[.]<=5' -q

$ qtool verify "$NANO"
? 3
2 qtool\.json

# One byte of the last tensor.
$ cp -r nf4 bad && size=$(wc -c <bad/model.safetensors) && printf 'x' | dd of=bad/model.safetensors bs=1 seek=$((size - 1)) conv=notrunc 2>dd.log
$ qtool verify bad
? 3
>-
2 ^qtool verify: bad.*: tensor model\.norm\.weight: .*CRC

$ head -c 100000 nf4/model.safetensors >bad/model.safetensors && qtool verify bad
? 3

# Another source: the checkpoint with one byte changed.
$ cp -r "$NANO" other && chmod -R u+w other && size=$(wc -c <other/model.safetensors) && printf 'x' | dd of=other/model.safetensors bs=1 seek=$((size - 1)) conv=notrunc 2>dd.log
$ qtool verify nf4 --source other -q
? 3
2 tensor model\.norm\.weight: is not a copy of the source's tensor

# Nothing is excused for claiming to be tuned where nothing was.
$ cp -r nf4 claim && chmod -R u+w claim && sed -i 's/"model.norm.weight": {/&"source_crc32": "89abcdef",/' claim/qtool.json && qtool verify claim --source "$NANO" -q
? 3
2 claim: tensor model\.norm\.weight: has 'source_crc32', but is no norm that 'identity\.learning' says was tuned
$ qtool verify claim -q
? 3
2 'identity\.learning'

# Bits in other places than those where they are looked for.
$ cp -r nf4 moved && chmod -R u+w moved && sed -i 's#frag16x64/nibble#frag16x64/half#' moved/qtool.json && qtool verify moved -q
? 4
2 moved: tensor model\..*: layout 'frag16x64/half', expected 'frag16x64/nibble': of another version of qtool, quantize again

# What the CRCs of the manifest do not cover.
$ cp -r nf4 side && chmod -R u+w side && sed -i 's/"rope_theta"/"rope_thota"/' side/config.json && qtool verify side -q
? 3
2 side/config\.json: is not what SHA256SUMS says
$ rm side/config.json && qtool verify side -q
? 3
2 side/config\.json
$ rm side/SHA256SUMS && qtool verify side -q
? 3
2 side/SHA256SUMS
$ cp -r nf4 listed && chmod -R u+w listed && cp listed/SHA256SUMS sums && : >listed/SHA256SUMS && qtool verify listed -q
? 3
2 listed/.*: is not in SHA256SUMS
$ grep -v config.json sums >listed/SHA256SUMS; qtool verify listed -q
? 3
2 listed/config\.json: is not in SHA256SUMS
$ grep -v qtool.json sums >listed/SHA256SUMS; qtool verify listed -q
? 3
2 listed/qtool\.json: is not in SHA256SUMS
$ cp sums listed/SHA256SUMS && echo >listed/README.md && qtool verify listed -q && cp listed/model.safetensors listed/stale.safetensors && qtool verify listed -q
? 3
2 listed/stale\.safetensors: is not in SHA256SUMS
$ mv listed/stale.safetensors listed/.stale.safetensors && qtool verify listed -q
? 3
2 listed/\.stale\.safetensors: is not in SHA256SUMS
$ rm listed/.stale.safetensors && qtool verify listed -q
# Other loaders would go by it.
$ echo '{"weight_map":{}}' >listed/model.safetensors.index.json && qtool verify listed -q
? 3
2 listed/model\.safetensors\.index\.json: is not in SHA256SUMS
# A file of the same name elsewhere does not stand for one of the container.
$ rm listed/model.safetensors.index.json && sed 's#  config.json#  ../nf4/config.json#' sums >listed/SHA256SUMS && qtool verify listed -q
? 3
2 listed/SHA256SUMS: line 1 is not a SHA-256 and a file's name
$ cp sums listed/SHA256SUMS && qtool verify listed -q

# A figure that is no number meets no condition: weights whose squares FP32 does not hold.
$ printf '%-96s' '{"a.weight":{"dtype":"F32","shape":[16,16],"data_offsets":[0,1024]}}' >header && { printf "\\$(printf %o $(wc -c <header))\0\0\0\0\0\0\0"; cat header; for i in $(seq 64); do printf '\0\0\200\143\0\0\100\343\1\0\240\142\3\0\120\343'; done; } >huge.safetensors && qtool quantize huge.safetensors -o huge --scheme none --tensor a=nf2 -q && qtool verify huge --source huge.safetensors --gate 'sqnr_min>=3' -q
> ^sqnr_min +[0-9.]+$

# Of nothing there are no figures, and no gate passes; quantize says it, too.
$ qtool quantize "$NANO" -o nothing --scheme none
2 nothing is quantized: all tensors are copied
$ qtool verify nothing --source "$NANO" --gate 'sqnr_min>=1' -q
? 5
2 sqnr_min is -?nan, required >= 1
$ qtool verify nothing --gate 'bpw<=4' -q
? 5
2 bpw is -?nan, required <= 4

# What it is not.
$ qtool verify "$NANO"
? 3
2 is no container: there is no qtool\.json in it
