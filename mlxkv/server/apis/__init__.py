"""A room an API: its bodies, what they wish for, its replies and errors, and one function that gives its routes.

No room imports another; what they have in common stands in `generation`. A new API, OpenAI's Responses say, is a new
room here and a line in `server/app`.
"""
