"""Parser of the command line, the configuration file and the environment into a `RunConfig`.

``precedence.py`` decides which source sets each option. ``parse.py`` collects all problems before
it reports them. ``help_text.py`` and ``print_config.py`` write the output of ``--help`` and
``--print-config``.
"""
