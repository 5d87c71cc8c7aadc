"""`optimum-cli hfq VERB …`: the verbs of the `hfq` command under optimum's. optimum finds this file by the
folder it is in.

The folders above hold no `__init__.py`: they are namespaces (PEP 420) that optimum's own files share.
"""

from argparse import REMAINDER, ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

__all__ = ["REGISTER_COMMANDS", "HfqCommand"]


class HfqCommand(BaseOptimumCLICommand):
    """Hands everything behind `hfq` to hfq's own command, which parses it."""

    COMMAND = CommandInfo(
        name="hfq", help="Quantize, convert, evaluate, compare, and plan checkpoints of any format with hfq."
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Takes down a verb and what follows it."""
        parser.description = HfqCommand.COMMAND.help
        parser.epilog = "`optimum-cli hfq VERB --help` tells the options of a verb."
        parser.add_argument(
            "arguments",
            nargs=REMAINDER,
            metavar="VERB ...",
            help="quantize, convert, evaluate, compare, plan, or another verb of hfq",
        )

    def run(self) -> None:
        """Runs the verb."""
        from hfq.cli import main

        main(self.args.arguments, "optimum-cli hfq")


REGISTER_COMMANDS = [HfqCommand]
