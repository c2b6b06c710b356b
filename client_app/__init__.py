"""The ClientApp: what runs on the devices."""
