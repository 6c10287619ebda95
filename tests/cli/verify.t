$ qtool quantize "$NANO" -o nf4 --scheme nf4:g=64 -q

$ qtool verify nf4 --progress none
> ^TENSOR +SCHEME +SHAPE +BPW
> ^container +sound
> ^tensors +21 quantized, 8 copied$
>! sqnr_min
2-

# -q: the summary only. Gates are listed with the measured values.
$ qtool verify nf4 --source "$NANO" --gate 'bpw<=4.3,sqnr_min>=18,cosine_min>0.9,bytes<2e6,sqnr[layers.[12]]>=9' -q
>! TENSOR
> ^container +sound.*copied tensors equal the source$
> ^gate  passed bpw <= 4\.3: 4\.[0-9]+$
> ^gate  passed sqnr\[layers\.\[12\]\] >= 9: 2[0-9]\.
2-
$ qtool verify nf4 --gate 'bpw<=4.3,bpw[up]<=4' --json -q
? 5
> "condition": "bpw <= 4\.3"
> "condition": "bpw\[up\] <= 4"
> "passed": false
$ qtool verify nf4 --source "$NANO" --gate 'bpw<=4.3,sqnr_min>=18,cosine_min>0.9,bytes<2e6' -q
> ^container +sound.*copied tensors equal the source$
> ^sqnr_min +2[0-9]
> ^mse_max +

$ qtool verify nf4 --source "$NANO" --gate 'bpw<=4,sqnr_min>=18,cosine_min>=0.9999' -q
? 5
> ^container +sound
2 ^qtool verify: gate failed: bpw is 4\.[0-9]+, required <= 4; cosine_min is 0\.99[0-9]+, required >= 0\.9999$

# Conditions per tensor; failures name the tensor.
$ qtool verify nf4 --source "$NANO" --gate 'sqnr>=18,sqnr[.]>=18,bpw[mlp\.]<=4.3' -q
$ qtool verify nf4 --source "$NANO" --gate 'sqnr[layers\.1\.mlp\.up]>=90,bpw<=5' -q
? 5
2 gate failed: sqnr of model\.layers\.1\.mlp\.up_proj\.weight is 2[0-9.]+, required >= 90$
$ qtool verify nf4 --source "$NANO" --gate 'sqnr[lm_head]>=1' -q
? 2
2 gate: 'lm_head' matches no quantized tensor
# This is found before the container is checked.
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

# The source differs in one byte.
$ cp -r "$NANO" other && chmod -R u+w other && size=$(wc -c <other/model.safetensors) && printf 'x' | dd of=other/model.safetensors bs=1 seek=$((size - 1)) conv=notrunc 2>dd.log
$ qtool verify nf4 --source other -q
? 3
2 tensor model\.norm\.weight: differs from the copied tensor of the source

# Without learning, a tensor marked as tuned is an error.
$ cp -r nf4 claim && chmod -R u+w claim && sed -i 's/"model.norm.weight": {/&"source_crc32": "89abcdef",/' claim/qtool.json && qtool verify claim --source "$NANO" -q
? 3
2 claim: tensor model\.norm\.weight: has 'source_crc32', which only norms tuned by 'identity\.learning' may have
$ qtool verify claim -q
? 3
2 'identity\.learning'

# A layout of another version.
$ cp -r nf4 moved && chmod -R u+w moved && sed -i 's#frag16x64/nibble#frag16x64/half#' moved/qtool.json && qtool verify moved -q
? 4
2 moved: tensor model\..*: layout 'frag16x64/half', expected 'frag16x64/nibble': written by another version of qtool, quantize again

# Files that the CRCs of the manifest do not cover.
$ cp -r nf4 side && chmod -R u+w side && sed -i 's/"rope_theta"/"rope_thota"/' side/config.json && qtool verify side -q
? 3
2 side/config\.json: differs from its checksum in SHA256SUMS
$ rm side/config.json && qtool verify side -q
? 3
2 side/config\.json
$ rm side/SHA256SUMS && qtool verify side -q
? 3
2 side/SHA256SUMS
$ cp -r nf4 listed && chmod -R u+w listed && cp listed/SHA256SUMS sums && : >listed/SHA256SUMS && qtool verify listed -q
? 3
2 listed/.*: is not listed in SHA256SUMS
$ grep -v config.json sums >listed/SHA256SUMS; qtool verify listed -q
? 3
2 listed/config\.json: is not listed in SHA256SUMS
$ grep -v qtool.json sums >listed/SHA256SUMS; qtool verify listed -q
? 3
2 listed/qtool\.json: is not listed in SHA256SUMS
$ cp sums listed/SHA256SUMS && echo >listed/README.md && qtool verify listed -q && cp listed/model.safetensors listed/stale.safetensors && qtool verify listed -q
? 3
2 listed/stale\.safetensors: is not listed in SHA256SUMS
$ mv listed/stale.safetensors listed/.stale.safetensors && qtool verify listed -q
? 3
2 listed/\.stale\.safetensors: is not listed in SHA256SUMS
$ rm listed/.stale.safetensors && qtool verify listed -q
# An index file, which other loaders would follow.
$ echo '{"weight_map":{}}' >listed/model.safetensors.index.json && qtool verify listed -q
? 3
2 listed/model\.safetensors\.index\.json: is not listed in SHA256SUMS
# A path outside the container does not count.
$ rm listed/model.safetensors.index.json && sed 's#  config.json#  ../nf4/config.json#' sums >listed/SHA256SUMS && qtool verify listed -q
? 3
2 listed/SHA256SUMS: line 1 is not a SHA-256 checksum and a file name
$ cp sums listed/SHA256SUMS && qtool verify listed -q

# Weights whose squares overflow FP32 still have an SQNR.
$ printf '%-96s' '{"a.weight":{"dtype":"F32","shape":[16,16],"data_offsets":[0,1024]}}' >header && { printf "\\$(printf %o $(wc -c <header))\0\0\0\0\0\0\0"; cat header; for i in $(seq 64); do printf '\0\0\200\143\0\0\100\343\1\0\240\142\3\0\120\343'; done; } >huge.safetensors && qtool quantize huge.safetensors -o huge --scheme none --tensor a=nf2 -q && qtool verify huge --source huge.safetensors --gate 'sqnr_min>=3' -q
> ^sqnr_min +[0-9.]+$

# If no tensor is quantized, quantize warns, figures are NaN, and no gate passes.
$ qtool quantize "$NANO" -o nothing --scheme none
2 nothing is quantized: all tensors are copied
$ qtool verify nothing --source "$NANO" --gate 'sqnr_min>=1' -q
? 5
2 sqnr_min is undefined, required >= 1
$ qtool verify nothing --gate 'bpw<=4' -q
? 5
2 bpw is undefined, required <= 4

# Not a container.
$ qtool verify "$NANO"
? 3
2 is not a container: it has no qtool\.json
