"""What ranks do in the tests: functions of modules, so that processes can run them."""
