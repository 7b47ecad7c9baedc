"""The command line: parse, plan, ask, act, report. The only package that knows Typer and Rich."""
