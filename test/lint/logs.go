// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"strconv"
	"strings"
)

// checkLogs returns the calls of a logger (logr, klog) in a Go file if the message is not a constant sentence, or a key
// is not a string literal of logKeys: constant messages and keys can be searched for. golangci-lint's loggercheck
// checks that each key has a value.
func checkLogs(name string, content []byte) []finding {
	if !strings.HasSuffix(name, ".go") || generated(content) {
		return nil
	}
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, content, parser.SkipObjectResolution)
	if err != nil {
		return nil // the compiler reports it
	}
	var findings []finding
	add := func(at ast.Node, message string) {
		findings = append(findings, finding{name, files.Position(at.Pos()).Line, message})
	}
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		message, keys := logArguments(call)
		if text, ok := literal(message); message != nil && (!ok || !sentence.MatchString(text)) {
			add(message, "log message: write a literal that starts with a capital letter and has no period at the end")
		}
		for _, key := range keys {
			if text, ok := literal(key); !ok || !logKeys[text] {
				add(key, fmt.Sprintf("log key %q: use a literal of test/lint/logkeys.go, or add one in lower camel case", text))
			}
		}
		return true
	})
	return findings
}

var sentence = regexp.MustCompile(`^[A-Z](.*[^.!:\s])?$`)

// logArguments returns the message and the keys of a call of a logger. message is nil for WithValues, and for other
// calls.
func logArguments(call *ast.CallExpr) (message ast.Expr, keys []ast.Expr) {
	method, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || !isLogger(method.X) {
		return nil, nil
	}
	var first int // the index of the first key
	switch method.Sel.Name {
	case "WithValues":
	case "Info":
		first = 1
	case "Error":
		first = 2
	default:
		return nil, nil
	}
	if len(call.Args) < first {
		return nil, nil // the compiler reports it
	}
	if first > 0 {
		message = call.Args[first-1]
	}
	for i := first; i < len(call.Args) && !call.Ellipsis.IsValid(); i += 2 {
		keys = append(keys, call.Args[i])
	}
	return message, keys
}

// isLogger reports whether an expression is a logger by the conventions of this repository: a variable or field named
// logger, or a call of one of the functions that return a logger.
func isLogger(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name == "logger"
	case *ast.SelectorExpr:
		return e.Sel.Name == "logger"
	case *ast.CallExpr:
		function, ok := e.Fun.(*ast.SelectorExpr)
		if !ok {
			return false
		}
		switch function.Sel.Name {
		case "FromContext", "FromContextOrDiscard", "GetLogger":
			return true
		case "V", "WithName", "WithValues":
			return isLogger(function.X)
		}
	}
	return false
}

// literal returns the value of a string literal, or of a sum of them.
func literal(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		return text, err == nil && e.Kind == token.STRING
	case *ast.BinaryExpr:
		left, leftOK := literal(e.X)
		right, rightOK := literal(e.Y)
		return left + right, leftOK && rightOK && e.Op == token.ADD
	}
	return "", false
}
