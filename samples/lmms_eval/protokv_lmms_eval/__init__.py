"""The plugin for lmms-eval: `plugin` has the chat model that the harness finds, `answerer` answers
its questions.
"""
