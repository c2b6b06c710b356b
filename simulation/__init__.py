"""The engines that run the unchanged ServerApp and ClientApp, and the command ``fedssl``."""

from fedssl.command_line import check_packages

check_packages()  # the command does so itself; here for notebooks, whose folder comes first in the import path
