"""Words of a source: its subtitles, from file or track to step, and the transcript that a state
keeps.
"""
