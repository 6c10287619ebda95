# mix24: true sizes and those of its paper, parameters, and containers with invalid values.
$ qtool list schemes
> ^mix24: 2- and 4-bit groups
> ^  four +0\.\.1 +0\.25 +fraction of the groups

$ qtool plan "$NANO" --scheme mix24 | tail -n 5
> ^bpw +3\.5608 bits per quantized weight$
> ^paper +3\.2046 as counted in the scheme's paper
$ qtool plan "$NANO" --scheme nf4
>! ^paper
$ qtool quantize "$NANO" -o q --scheme mix24 -q
> ^bpw +3\.5608 bits per quantized weight$
> ^paper +3\.2046 as counted in the scheme's paper
$ qtool inspect q | tail -n 5
> ^bpw +3\.5608 bits per quantized weight$
> ^paper +3\.2046 as counted in the scheme's paper
$ qtool quantize "$NANO" -o q --scheme mix24 -q --force --json >made.json
$ grep -c '"paper_bpw": 3\.20' made.json
$ qtool verify q --source "$NANO" --gate 'sqnr_min>=10,bpw<=3.6' -q
> ^container +sound.*copied tensors equal the source

# The same bytes for any number of threads.
$ qtool quantize "$NANO" -o q1 --scheme mix24 -q --threads 1 && cmp q/model.safetensors q1/model.safetensors

# Parameters with more digits than the manifest stores: sizes follow from the stored ones.
$ qtool quantize "$NANO" -o d --scheme mix24:four=0.24999999999,outliers=0.00195312499999 -q && qtool verify d --source "$NANO" -q
> ^container +sound.*copied tensors equal the source

$ qtool plan "$NANO" --scheme mix24:g=12
? 2
2 g=12: must be 8 or 16
$ qtool plan "$NANO" --scheme mix24:four=2
? 2
2 four=2.*0 to 1

# Invalid stored values with valid checksums (made by poke.py) are refused before the weights are used.
need command -v python3
$ echo 'cp -r q bad && python3 "$BAD/../oracle/poke.py" bad model.layers.1.mlp.down_proj.weight "$@" && rm bad/SHA256SUMS && qtool eval bad --data "$NANO/eval.txt" --windows 1 -q; s=$?; rm -rf bad; exit $s' >lie.sh
$ sh lie.sh csr_ptr 0 1
? 3
2 tensor model\.layers\.1\.mlp\.down_proj\.weight: csr_ptr: the first is 1, not 0
$ sh lie.sh csr_ptr 7 1000000
? 3
2 csr_ptr: entry 8 is less than the one before it
$ sh lie.sh csr_ptr -1 4000000000
? 3
2 csr_ptr: the last is 4000000000 of 262 entries
$ sh lie.sh csr_col 5 65535
? 3
2 csr_col: entry (5|6)
$ sh lie.sh csr_val 0 0x7e00
? 3
2 csr_val: entry 0 is not finite
$ sh lie.sh perm 0 32
? 3
2 perm: slot 0 has group 32 of 32
$ sh lie.sh perm 1 0
? 3
2 perm: group 0 is in two slots
$ sh lie.sh perm 1 0xffff
? 3
2 perm: 1 of 32 groups are in no slot
$ sh lie.sh stream 608 0xff
? 3
2 slot 0 of strip 0: reserved bits are set
$ sh lie.sh stream 609 0x7f
? 3
2 slot 0 of strip 0: s2 is not positive and finite
$ sh lie.sh stream 609 0x7b
? 3
2 row 0, slot 0: the scale is beyond FP16

# Sections of the wrong size.
$ cp -r q bad && rm bad/SHA256SUMS && sed -i 's/g2=16/g2=8/' bad/qtool.json && qtool eval bad --data "$NANO/eval.txt" --windows 1 -q
? 3
2 section 'stream' does not match scheme .mix24:.* for
