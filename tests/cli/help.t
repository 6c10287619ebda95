# The help of every command has usage, options, examples and exit status, in 80 columns.

$ qtool inspect --help
> ^usage: qtool inspect
> ^Common options:
>       --threads N
>       --json
>   -h, --help
> ^Examples:
> ^  qtool inspect
> ^Exit status:
>!  .{81}
2-

$ qtool plan --help
> ^usage: qtool plan
> ^Common options:
>       --threads N
>       --json
>   -h, --help
> ^Examples:
> ^  qtool plan
> ^Exit status:
>!  .{81}
2-

$ qtool calibrate --help
> ^usage: qtool calibrate
> ^Common options:
>       --threads N
>       --json
>   -h, --help
> ^Examples:
> ^  qtool calibrate
> ^Exit status:
>!  .{81}
2-

$ qtool quantize --help
> ^usage: qtool quantize
> ^Common options:
>       --threads N
>       --json
>   -h, --help
> ^Examples:
> ^  qtool quantize
> ^Exit status:
>!  .{81}
2-

$ qtool verify --help
> ^usage: qtool verify
> ^Common options:
>       --threads N
>       --json
>   -h, --help
> ^Examples:
> ^  qtool verify
> ^Exit status:
>!  .{81}
2-

$ qtool eval --help
> ^usage: qtool eval
> ^Common options:
>       --threads N
>       --json
>   -h, --help
> ^Examples:
> ^  qtool eval
> ^Exit status:
>!  .{81}
2-

$ qtool generate --help
> ^usage: qtool generate
> ^Common options:
> ^Examples:
> ^  qtool generate
> ^Exit status:
>!  .{81}
2-

$ qtool list --help
> ^usage: qtool list
> ^Common options:
>       --threads N
>       --json
>   -h, --help
> ^Examples:
> ^  qtool list
> ^Exit status:
>!  .{81}
2-

$ qtool version --help
> ^usage: qtool version \[common options\]$
> ^Common options:
>       --threads N
>       --json
>   -h, --help
> ^Examples:
> ^  qtool version
> ^Exit status:
>!  .{81}
2-

$ qtool manual --help
> ^usage: qtool manual \[common options\]$
2-

# -h is honored even if other arguments are wrong; -- ends options.
$ qtool eval -h --nonsense
> ^usage: qtool eval

$ qtool eval -- --help
? 2
2 --data FILE is missing

$ qtool quantize --help
> ^usage: qtool quantize CKPT -o OUT
>   -o, --out OUT +directory of the container \(required\)
> may be repeated

$ qtool help help && qtool help --help
> ^Usage|^usage
2-
