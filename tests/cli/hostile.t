# Malicious and damaged files, with the exit status and message of each. tests/oracle/make_bad.py makes
# the files. The end checks that nothing else was written.
$ ls -A >before

# ---- safetensors
$ qtool inspect $BAD/safetensors/dtype_half_byte.safetensors
? 3
2 tensor a: 3 elements of F4 end inside a byte
$ qtool inspect $BAD/safetensors/dtype_number.safetensors
? 3
2 tensor a: 'dtype' must be a string
$ qtool inspect $BAD/safetensors/dtype_unknown.safetensors
? 4
2 tensor a: unknown dtype 'F7'
$ qtool inspect $BAD/safetensors/duplicate.safetensors
? 3
2 line 1, column 56: duplicate object key near '"a"'
$ qtool inspect $BAD/safetensors/empty.safetensors
? 3
2 the file is empty
$ qtool inspect $BAD/safetensors/entry_string.safetensors
? 3
2 tensor a: exactly 'dtype', 'shape' and 'data_offsets' are expected
$ qtool inspect $BAD/safetensors/header_100mb.safetensors
? 3
2 a header of 100000001 bytes: not a safetensors file \(2 to 100000000 expected\)
$ qtool inspect $BAD/safetensors/header_array.safetensors
? 3
2 the header does not start with '\{'
$ qtool inspect $BAD/safetensors/header_beyond_file.safetensors
? 3
2 the header of 1000 bytes goes beyond the end of the file \(72 bytes\)
$ qtool inspect $BAD/safetensors/header_cut.safetensors
? 3
2 line 1, column 5: unexpected token near end of file
$ qtool inspect $BAD/safetensors/header_huge.safetensors
? 3
2 a header of 9223372036854775808 bytes: not a safetensors file \(2 to 100000000 expected\)
$ qtool inspect $BAD/safetensors/header_nested.safetensors
? 3
2 line 1, column 69: JSON nested deeper than 64 levels
$ qtool inspect $BAD/safetensors/header_one_byte.safetensors
? 3
2 a header of 1 bytes: not a safetensors file \(2 to 100000000 expected\)
$ qtool inspect $BAD/safetensors/header_utf8.safetensors
? 3
2 line 1, column 2: unable to decode byte 0xff near '"'
$ qtool inspect $BAD/safetensors/hole.safetensors
? 3
2 tensor b: 1 bytes before its data belong to no tensor
$ qtool inspect $BAD/safetensors/member_missing.safetensors
? 3
2 tensor a: exactly 'dtype', 'shape' and 'data_offsets' are expected
$ qtool inspect $BAD/safetensors/member_more.safetensors
? 3
2 tensor a: exactly 'dtype', 'shape' and 'data_offsets' are expected
$ qtool inspect $BAD/safetensors/metadata_number.safetensors
? 3
2 '__metadata__': 'format' must be a string
$ qtool inspect $BAD/safetensors/name_control.safetensors
? 3
2 a tensor's name has a control character: 'a.\[2J'
$ qtool inspect $BAD/safetensors/name_empty.safetensors
? 3
2 a tensor has an empty name
$ qtool inspect $BAD/safetensors/name_long.safetensors
? 3
2 a tensor's name has 513 bytes, but at most 512 are allowed
$ qtool inspect $BAD/safetensors/name_nul.safetensors
? 3
2 line 1, column 11: NUL byte in object key not supported near '"a\\u0000b"'
$ qtool inspect $BAD/safetensors/nine_bytes.safetensors
? 3
2 9 bytes are too few for safetensors
$ qtool inspect $BAD/safetensors/offsets_backwards.safetensors
? 3
2 tensor a: 'data_offsets' run backwards
$ qtool inspect $BAD/safetensors/offsets_beyond.safetensors
? 3
2 tensor a: data ends at byte 8, but the file has only 4 bytes of data
$ qtool inspect $BAD/safetensors/offsets_huge.safetensors
? 3
2 tensor a: data ends at byte 4611686018427387908, but the file has only 4 bytes of data
$ qtool inspect $BAD/safetensors/offsets_short.safetensors
? 3
2 tensor a: dtype and shape need 2 bytes, but 'data_offsets' span 4
$ qtool inspect $BAD/safetensors/offsets_three.safetensors
? 3
2 tensor a: 'data_offsets' must be two non-negative integers
$ qtool inspect $BAD/safetensors/overlap.safetensors
? 3
2 tensor b: data overlaps that of 'a'
$ qtool inspect $BAD/safetensors/shape_integer.safetensors
? 3
2 tensor a: 'shape' must hold non-negative integers
$ qtool inspect $BAD/safetensors/shape_negative.safetensors
? 3
2 tensor a: 'shape' must hold non-negative integers
$ qtool inspect $BAD/safetensors/shape_product.safetensors
? 3
2 tensor a: shape is too large
$ qtool inspect $BAD/safetensors/shape_product_bits.safetensors
? 3
2 tensor a: shape is too large
$ qtool inspect $BAD/safetensors/shape_real.safetensors
? 3
2 tensor a: 'shape' must hold non-negative integers
$ qtool inspect $BAD/safetensors/shape_wide.safetensors
? 4
2 tensor a: has 9 dimensions, but at most 8 are supported
$ qtool inspect $BAD/safetensors/trailing.safetensors
? 3
2 5 bytes at the end belong to no tensor

$ n=$(printf 'x\302\233.safetensors') && ! qtool inspect "$n" 2>err && ! grep -q "$n" err && cat err >&2
2 x\?\?\.safetensors: cannot open
$ rm err

# ---- PyTorch: no code is executed
$ qtool inspect $BAD/torch/big_endian.bin
? 4
2 byte order 'big': only little-endian files can be read
$ qtool inspect $BAD/torch/bomb.bin
? 3
2 zip entry 'm/data\.pkl': claims to inflate to more than deflate can express
$ qtool inspect $BAD/torch/crc.bin
? 3
2 zip entry 'm/data\.pkl': checksum \(CRC-32\) is wrong: the file is damaged
$ qtool inspect $BAD/torch/cut.bin
? 3
2 zip: no end of central directory: truncated, or not a zip archive
$ qtool inspect $BAD/torch/deflated_damaged.bin
? 3
2 zip entry 'm/data\.pkl': deflated data is damaged or has another size than stated
$ qtool inspect $BAD/torch/empty_pickle.bin
? 3
2 pickle: does not start with a PROTO instruction
$ qtool inspect $BAD/torch/encrypted.bin
? 3
2 zip entry 'm/data\.pkl': encrypted
$ qtool inspect $BAD/torch/eval.bin
? 3
2 pickle refers to builtins\.eval: only tensors are allowed
$ qtool inspect $BAD/torch/memo.bin
? 3
2 pickle: reads a memo entry that is not set
$ qtool inspect $BAD/torch/method.bin
? 4
2 zip entry 'm/data\.pkl': compression method 14
$ qtool inspect $BAD/torch/name_metadata.bin
? 3
2 a tensor is named '__metadata__', which safetensors reserves for metadata
$ qtool inspect $BAD/torch/no_pickle.bin
? 3
2 not a PyTorch checkpoint: no data\.pkl in the archive
$ qtool inspect $BAD/torch/no_stop.bin
? 3
2 pickle: ends without a STOP instruction
$ qtool inspect $BAD/torch/not_a_dict.bin
? 4
2 holds no state dict: a dict of named tensors, or one under 'state_dict' or 'model', is expected
$ qtool inspect $BAD/torch/not_zip.bin
? 4
2 written by PyTorch before 1\.6: load it with torch\.load and save it again
$ qtool inspect $BAD/torch/opcode.bin
? 3
2 pickle: instruction 0xff is not used for tensors
$ qtool inspect $BAD/torch/overlap.bin
? 3
2 zip entry 'm/data/0': its local header has another name
$ qtool inspect $BAD/torch/protocol.bin
? 4
2 pickle protocol 9, but 2 to 5 are supported
$ qtool inspect $BAD/torch/shape_negative.bin
? 3
2 tensor w: sizes, strides and offset must not be negative
$ qtool inspect $BAD/torch/shape_product.bin
? 3
2 tensor w: shape is too large
$ qtool inspect $BAD/torch/storage_missing.bin
? 3
2 tensor w: storage '7' is not in the archive
$ qtool inspect $BAD/torch/storage_outside.bin
? 3
2 tensor w: storage '\.\./data\.pkl' is not in the archive
$ qtool inspect $BAD/torch/storage_short.bin
? 3
2 tensor w: storage '0' has 16 bytes, but 5 elements of F32 are stated
$ qtool inspect $BAD/torch/string_beyond.bin
? 3
2 pickle: ends in the middle of an instruction
$ qtool inspect $BAD/torch/system.bin
? 3
2 pickle refers to os\.system: only tensors are allowed
$ qtool inspect $BAD/torch/underflow.bin
? 3
2 pickle: takes a value that is not on its stack
$ qtool inspect $BAD/torch/view_beyond.bin
? 3
2 tensor w: reaches element 6 of a storage of 4 elements
$ qtool inspect $BAD/torch/view_expanded.bin
? 4
2 tensor w: 1099511627776 elements expanded from a storage of 4
$ qtool inspect $BAD/torch/view_offset.bin
? 3
2 tensor w: reaches element 4 of a storage of 4 elements
$ qtool inspect $BAD/torch/view_overflow.bin
? 3
2 tensor w: reaches element 13835058055282163711 of a storage of 4 elements

# ---- index of a checkpoint with several files: names must stay in its directory
$ mkdir -p in/d && cp $BAD/beside/outside.safetensors in && cp $BAD/beside/one.safetensors $BAD/beside/two.safetensors $BAD/beside/three.safetensors in/d
$ cp $BAD/index/absolute.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 tensor e: '/etc/passwd' is not the name of a checkpoint file in this directory
$ cp $BAD/index/array.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 'weight_map' must be an object
$ cp $BAD/index/dots.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 tensor a: '\.\.' is not the name of a checkpoint file in this directory
$ cp $BAD/index/duplicate.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 line 1, column 40: duplicate object key near '"a"'
$ cp $BAD/index/empty.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 'weight_map' is empty
$ cp $BAD/index/folder.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 tensor a: 'x/one\.safetensors' is not the name of a checkpoint file in this directory
$ cp $BAD/index/missing_file.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 tensor a: its file 'four\.safetensors' does not exist
$ cp $BAD/index/missing_tensor.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 tensor z: is not in 'two\.safetensors', where the index puts it
$ cp $BAD/index/name_escape.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 tensor a: 'one.\.safetensors' is not the name of a checkpoint file in this directory
$ cp $BAD/index/no_map.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 'weight_map' must be an object
$ cp $BAD/index/not_listed.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 tensor b: is not listed in in/d/model\.safetensors\.index\.json
$ cp $BAD/index/number.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 tensor a: its file name must be a string
$ cp $BAD/index/other_ending.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 tensor a: 'config\.json' is not the name of a checkpoint file in this directory
$ cp $BAD/index/parent.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 tensor e: '\.\./outside\.safetensors' is not the name of a checkpoint file in this directory
$ cp $BAD/index/wrong_file.json in/d/model.safetensors.index.json && qtool inspect in/d
? 3
2 tensor a: is in this file, but the index puts it in 'two\.safetensors'
$ rm -r in

# ---- token ids
$ qtool eval $NANO --data $BAD/npy/big_endian.npy --seqlen 2
? 4
2 npy data type '>u4' is not supported: it must be a little-endian number
$ qtool eval $NANO --data $BAD/npy/code.npy --seqlen 2
? 3
2 npy header: 'shape' must be a tuple of sizes
$ qtool eval $NANO --data $BAD/npy/floats.npy --seqlen 2
? 3
2 token ids must be integers in one dimension, not F32 in 1
$ qtool eval $NANO --data $BAD/npy/fortran.npy --seqlen 2
? 4
2 npy arrays in Fortran order are not supported
$ qtool eval $NANO --data $BAD/npy/header_beyond.npy --seqlen 2
? 3
2 npy header is truncated
$ qtool eval $NANO --data $BAD/npy/header_huge.npy --seqlen 2
? 3
2 npy header has 2147483648 bytes, but at most 65536 are allowed
$ qtool eval $NANO --data $BAD/npy/id_negative.npy --seqlen 2
? 3
2 token 1 is negative: -1
$ qtool eval $NANO --data $BAD/npy/id_too_large.npy --seqlen 2
? 3
2 token 1 is 2147483648, but the vocabulary has 1024
$ qtool eval $NANO --data $BAD/npy/long.npy --seqlen 2
? 3
2 npy shape needs 8 bytes of data, but the file has 9
$ qtool eval $NANO --data $BAD/npy/magic.npy --seqlen 2
? 3
2 not a \.npy file
$ qtool eval $NANO --data $BAD/npy/object.npy --seqlen 2
? 4
2 npy data type '\|O' is not supported: it must be a little-endian number
$ qtool eval $NANO --data $BAD/npy/records.npy --seqlen 2
? 4
2 npy structured arrays are not supported
$ qtool eval $NANO --data $BAD/npy/shape_digits.npy --seqlen 2
? 3
2 npy header: 'shape' must be a tuple of sizes
$ qtool eval $NANO --data $BAD/npy/shape_negative.npy --seqlen 2
? 3
2 npy header: 'shape' must be a tuple of sizes
$ qtool eval $NANO --data $BAD/npy/shape_product.npy --seqlen 2
? 3
2 shape is too large
$ qtool eval $NANO --data $BAD/npy/short.npy --seqlen 2
? 3
2 npy shape needs 8 bytes of data, but the file has 7
$ qtool eval $NANO --data $BAD/npy/two_dimensions.npy --seqlen 2
? 3
2 token ids must be integers in one dimension, not U32 in 2
$ qtool eval $NANO --data $BAD/npy/version.npy --seqlen 2
? 4
2 npy format 9\.0 is not supported

# ---- config.json
$ cp -r "$NANO" n
$ cp $BAD/config/activation.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 4
2 'hidden_act': swish7 is not supported
$ cp $BAD/config/array.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 3
2 an object with 'model_type' is expected
$ cp $BAD/config/cut.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 3
2 line 1, column 23: string or '}' expected near end of file
$ cp $BAD/config/eps.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 3
2 'rms_norm_eps' is 0, not a positive number
$ cp $BAD/config/heads.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 3
2 'num_attention_heads' is 0, outside 1 \.\. 65536
$ cp $BAD/config/heads_uneven.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 3
2 'num_attention_heads' 4 is not a multiple of 'num_key_value_heads' 5
$ cp $BAD/config/hidden.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 3
2 'hidden_size' is 4611686018427387904, outside 1 \.\. 16777216
$ cp $BAD/config/hidden_negative.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 3
2 'hidden_size' is a negative integer, but a non-negative integer is expected
$ cp $BAD/config/hidden_text.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 3
2 'hidden_size' is a string, but a non-negative integer is expected
$ cp $BAD/config/layers_fewer.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 3
2 tensor model\.layers\.2\.self_attn\.o_proj\.weight: present, but 'num_hidden_layers' in config\.json is 2
$ cp $BAD/config/layers_many.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 3
2 'num_hidden_layers' is 1000000, outside 1 \.\. 4096
$ cp $BAD/config/layers_more.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 3
2 tensor model\.layers\.3\.input_layernorm\.weight: missing; config\.json implies shape \[256\]
$ cp $BAD/config/layers_none.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 3
2 'num_hidden_layers' is 0, outside 1 \.\. 4096
$ cp $BAD/config/model_type.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 4
2 'model_type': \.\./llama is not supported; 'qtool list archs' lists those that are$
$ cp $BAD/config/positions.json n/config.json && qtool eval n --data n/eval.txt --windows 1
? 3
2 'max_position_embeddings' is 1099511627776, outside 1 \.\. 1073741824
$ sed 's/"dynamic"/"spiral"/' $BAD/config/rope.json >n/config.json && qtool eval n --data n/eval.txt --windows 1
? 4
2 'rope_type': spiral is not supported

# ---- tokenizer.json (line 1 of each file is tokenizer_config.json)
$ cp "$NANO/config.json" n && echo hello >n/hello.txt
$ sed 1d $BAD/tokenizer/added_without_id.json >n/tokenizer.json && qtool eval n --data n/hello.txt --windows 1
? 3
2 'id' is missing
$ sed 1d $BAD/tokenizer/id_huge.json >n/tokenizer.json && qtool eval n --data n/hello.txt --windows 1
? 3
2 id is not an integer in range for token 'a'
$ sed 1d $BAD/tokenizer/id_negative.json >n/tokenizer.json && qtool eval n --data n/hello.txt --windows 1
? 3
2 id is not an integer in range for token 'a'
$ sed 1d $BAD/tokenizer/id_twice.json >n/tokenizer.json && qtool eval n --data n/hello.txt --windows 1
? 3
2 id is taken by another token: 'b'
$ sed 1d $BAD/tokenizer/merge_number.json >n/tokenizer.json && qtool eval n --data n/hello.txt --windows 1
? 3
2 merge 0 is not a pair of tokens
$ sed 1d $BAD/tokenizer/merge_three.json >n/tokenizer.json && qtool eval n --data n/hello.txt --windows 1
? 3
2 merge 0 is not a pair of tokens
$ sed 1d $BAD/tokenizer/merge_unknown.json >n/tokenizer.json && qtool eval n --data n/hello.txt --windows 1
? 3
2 merge 0 uses or produces 'z', which is not in the vocabulary
$ sed 1d $BAD/tokenizer/normalizer.json >n/tokenizer.json && qtool eval n --data n/hello.txt --windows 1
? 4
2 normalizer 'Nmt'
$ sed 1d $BAD/tokenizer/regex.json >n/tokenizer.json && qtool eval n --data n/hello.txt --windows 1
? 4
2 regex '\(a': missing closing parenthesis
$ sed 1d $BAD/tokenizer/unigram.json >n/tokenizer.json && qtool eval n --data n/hello.txt --windows 1
? 3
2 model.vocab is not an array
$ rm -r n

# ---- manifests
$ qtool quantize "$NANO" -o c --scheme fp6 -q && cp c/qtool.json good.json
$ sed 's/"format_version": 1/"format_version": 3/' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 4
2 format version 3, but this qtool
$ sed 's/"format": "qtool"/"format": "tool"/' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 3
2 not a qtool manifest
$ sed '/^ "tensors"/,$s/"scheme": "fp6/"scheme": "fp99/' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 3
2 scheme 'fp99
$ sed '/^ "tensors"/,$s/"scheme": "fp6[^"]*/"scheme": "none/' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 3
2 has no sections
$ sed '0,/"layout": "[^"]*/s//"layout": "other/' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 4
2 layout 'other', expected 'frag16x64/half': written by another version of qtool, quantize again
$ sed '0,/"name": "plane0"/s//"name": "..\/..\/x"/' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 3
2 section name '../../x' must be 1 to 32 characters of a-z 0-9 _
$ sed '0,/"name": "plane0"/s//"name": "plane9"/' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 3
2 is in the manifest but not in the safetensors files
$ sed '0,/"dtype": "U32"/s//"dtype": "F32"/' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 3
2 dtype is U32, but the manifest says F32
$ sed '0,/"scale_exp2": 0/s//"scale_exp2": 100000/' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 3
2 'scale_exp2' must be an integer from -1000 to 1000
$ sed '0,/"crc32": "[0-9a-f]*/s//"crc32": "00000000/' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 3
2 the manifest's 00000000: the file is damaged
$ sed '0,/"crc32": "[0-9a-f]*/s//"crc32": "xyz/' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 3
2 'crc32' must be 8 lower-case hexadecimal digits
$ sed 's/"model.norm.weight"/"model.gone.weight"/' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 3
2 is in the manifest but not in the safetensors files
$ sed 's/"copied"/"copies"/' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 3
2 'copied' must be an object
$ sed '1d' good.json >c/qtool.json && ! cmp -s good.json c/qtool.json && qtool verify c
? 3
2 line 1, column
$ cp good.json c/qtool.json && printf '\001' | dd of=c/model.safetensors bs=1 seek=200000 conv=notrunc status=none && qtool verify c
? 3
2 the file is damaged
$ truncate -s -1 c/model.safetensors && qtool verify c
? 3
2 the file has only [0-9]* bytes of data
$ rm c/model.safetensors && ln -s /etc/passwd c/model.safetensors && qtool verify c
? 3
2 c/model\.safetensors: not a safetensors file, but plain text
$ rm -r c good.json

# ---- key scales of a KV cache
$ qtool quantize "$NANO" -o k --scheme none --kv 4 --kv-keys static --data "$NANO/calib.txt" --samples 1 --seqlen 64 -q && cp k/qtool.json good.json
$ sed 's/"bits": 4/"bits": 8/' good.json >k/qtool.json && ! cmp -s good.json k/qtool.json && for x in inspect verify "eval --data $NANO/eval.txt --windows 1 --kv 4"; do qtool $x k; echo $?; done
> ^3$
>! ^[01245678]
2 k: 'kv\.bits' must be 4
$ sed 's/"scales": "static"/"scales": "other"/' good.json >k/qtool.json && ! cmp -s good.json k/qtool.json && qtool verify k
? 3
2 k: 'kv\.keys' and 'kv\.values' describe no cache
$ sed 's/"kv": {/"lv": {/' good.json >k/qtool.json && ! cmp -s good.json k/qtool.json && qtool inspect k
? 3
2 tensor kv\.layers\.0\.k_scale: is not listed in 'tensors', 'copied' or 'kv'
$ sed '/"kv.layers.2.k_zero"/,/"shape"/s/"F32"/"F16"/' good.json >k/qtool.json && ! cmp -s good.json k/qtool.json && qtool inspect k
? 3
2 tensor kv\.layers\.2\.k_zero: dtype is F32, but the manifest says F16
$ cp good.json k/qtool.json && qtool verify k -q && sed 's/_attention_heads": 4/_attention_heads": 2/; s/_value_heads": 2/_value_heads": 1/; s/"head_dim": 64/"head_dim": 128/' "$NANO/config.json" >k/config.json && (cd k && sha256sum $(ls | grep -v "SUMS\|report") >SHA256SUMS) && for x in verify "eval --data $NANO/eval.txt --windows 1 --kv 4"; do qtool $x k; echo $?; done
> ^3$
>! ^[01245678]
2 k/model\.safetensors: tensor kv\.layers\.0\.k_scale: must be F32 \[1, 128\] to match the model's keys
$ rm -r k good.json

# ---- not regular files
$ mkdir s && mkfifo s/model.safetensors && qtool inspect s
? 3
2 s/model\.safetensors: not a regular file
$ qtool inspect s/model.safetensors
? 3
2 not a regular file
$ rm s/model.safetensors && ln -s /dev/zero s/model.safetensors && qtool inspect s
? 3
2 not a regular file
$ rm s/model.safetensors && ln -s model.safetensors s/model.safetensors && qtool inspect s
? 6
2 cannot open: Too many levels of symbolic links
$ ln -s nowhere dangling && qtool plan dangling --scheme nf4; rc=$?; rm dangling; exit $rc
? 3
2 dangling: cannot open: No such file or directory
$ rm s/model.safetensors && ln -s gone s/model.safetensors && qtool inspect s
? 3
2 cannot open: No such file or directory
$ rm s/model.safetensors && mkdir s/model.safetensors && qtool inspect s
? 3
2 not a regular file
$ rm -r s
$ mkfifo p.txt && (cat "$NANO/eval.txt" >p.txt &) && timeout 20 qtool eval "$NANO" --data p.txt --windows 1 --seqlen 64 -q && rm p.txt
> ^perplexity
$ mkfifo idle.txt && timeout 1 qtool eval "$NANO" --data idle.txt; echo $?; rm idle.txt
> ^124$
$ mkdir s && cp "$NANO"/*.safetensors s && mkfifo s/config.json && timeout 10 qtool quantize s -o out --scheme fp6 -q
? 3
2 s/config\.json: not a regular file
$ test ! -e out && test ! -e out.partial && rm -r s

# ---- existing files and links in place of outputs
$ echo precious >file && qtool quantize "$NANO" -o file --scheme fp6 -q --force
? 2
2 file: exists and is not a directory
$ mkdir mine && echo precious >mine/file && ln -s mine link && qtool quantize "$NANO" -o link --scheme fp6 -q --force
? 2
2 link: is a symbolic link: name the directory itself
$ qtool quantize "$NANO" -o mine --scheme fp6 -q --force
? 2
2 not replaced: it has files but no qtool\.json
$ ln -s mine out.partial && qtool quantize "$NANO" -o out --scheme fp6 -q
? 6
2 out\.partial: cannot open directory
$ rm out.partial && mkdir out.partial && ln -s ../file out.partial/journal && qtool quantize "$NANO" -o out --scheme fp6 -q --resume
? 2
2 out\.partial: not replaced
$ echo '{"format":"qtool-journal",' >like && ln -sf ../like out.partial/journal && qtool quantize "$NANO" -o out --scheme fp6 -q --resume
? 6
2 out\.partial/journal: cannot create
$ rm out.partial/journal && ln -s ../file out.partial/model.safetensors && qtool quantize "$NANO" -o out --scheme fp6 -q
? 2
2 not replaced
$ rm -r out.partial && qtool quantize "$NANO" -o ./.. --scheme fp6 -q
? 2
2 not a valid name for a new directory
$ qtool quantize "$NANO" -o '' --scheme fp6 -q
? 2
$ cat file mine/file like | sort -u
> ^precious$
> ^."format":"qtool-journal",$
$ rm -r file link mine like
$ ls -A | diff before - && test ! -e owned
