"""The engines that run the unchanged ServerApp and ClientApp, and the command ``fedssl``."""
