"""An HTTP server that speaks the protocol of OpenAI's chat and completion endpoints.

listen -> app -> schema, prompts, replies -> grammar, tools. Only this package and commands/serve.py import
starlette, uvicorn and llguidance, and only when a server is made. It knows the scheduler, not sessions or layers.
"""
