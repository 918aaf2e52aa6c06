#!/bin/sh
# Is there a Java that Spark can run on? Says how to get one if not.
needed=17

if [ -n "${JAVA_HOME:-}" ] && [ -x "$JAVA_HOME/bin/java" ]; then
    java="$JAVA_HOME/bin/java"
else
    java=$(command -v java 2>/dev/null)
fi

found="no Java was found"
if [ -n "$java" ]; then
    # 'openjdk version "17.0.15" ...', 'java version "1.8.0_391"', 'openjdk version "21" ...'
    version=$("$java" -version 2>&1 | sed -n 's/.* version "\([^"]*\)".*/\1/p' | head -n 1)
    major=${version#1.}
    major=${major%%[!0-9]*}
    [ -n "$major" ] && [ "$major" -ge "$needed" ] && exit 0
    # macOS has a /usr/bin/java that only says where to get one.
    [ -n "$version" ] && found="$java is Java $version"
fi

if command -v apt-get >/dev/null 2>&1; then
    install="apt-get install openjdk-17-jre-headless"
    [ "$(id -u)" = 0 ] || install="sudo $install"
elif command -v dnf >/dev/null 2>&1; then
    install="sudo dnf install java-17-openjdk-headless"
elif command -v apk >/dev/null 2>&1; then
    install="apk add openjdk17-jre-headless"
elif command -v brew >/dev/null 2>&1; then
    install="brew install openjdk@17"
else
    install="install a Java runtime, version $needed or newer, with your system's package manager"
fi

cat >&2 <<MESSAGE
Spark runs on Java $needed or newer, and $found. Install one:

    $install

or, if there is one already, say where:

    export JAVA_HOME=/path/to/java
MESSAGE
exit 1
