"""One module a command. Each imports MLX, and what needs MLX, inside the command's body.

That is the one place in this project where an import inside a function is right: `mlxkv --help` imports every module
here, must answer in half a second, and MLX with its models takes longer than that.
"""
