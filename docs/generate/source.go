// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// source is the exported API of a package.
type source struct {
	path  string // relative to the root
	files map[string]*ast.File
	types map[string]*ast.TypeSpec
	docs  map[string]string // of types
	// values holds the string constants.
	values map[string]string
	// enums lists the constants of a string type.
	enums map[string][]constant
}

// constant is a documented string constant.
type constant struct {
	name, value, doc string
}

// group is a block of constants that are declared together.
type group struct {
	doc       string
	constants []constant
}

// readSource parses the package in a directory, without its tests and generated files.
func readSource(root, path string) (*source, error) {
	s := &source{path: path, files: map[string]*ast.File{}, types: map[string]*ast.TypeSpec{}, docs: map[string]string{},
		values: map[string]string{}, enums: map[string][]constant{}}
	names, err := filepath.Glob(filepath.Join(root, path, "*.go"))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		base := filepath.Base(name)
		if strings.HasSuffix(base, "_test.go") || strings.HasPrefix(base, "zz_generated") {
			continue
		}
		raw, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, raw, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		s.files[base] = file
	}
	s.readValues()
	s.readTypes()
	return s, nil
}

// declarations returns the declarations of one kind in all files, in order.
func (s *source) declarations(kind token.Token) (all []*ast.GenDecl) {
	for _, name := range sortedKeys(s.files) {
		for _, d := range s.files[name].Decls {
			if g, ok := d.(*ast.GenDecl); ok && g.Tok == kind {
				all = append(all, g)
			}
		}
	}
	return all
}

func (s *source) readTypes() {
	for _, d := range s.declarations(token.TYPE) {
		for _, spec := range d.Specs {
			if t, ok := spec.(*ast.TypeSpec); ok {
				s.types[t.Name.Name] = t
				s.docs[t.Name.Name] = comment(d.Doc, t.Doc)
			}
		}
	}
	for _, d := range s.declarations(token.CONST) {
		for _, spec := range d.Specs {
			if v, ok := spec.(*ast.ValueSpec); ok {
				if t, ok := v.Type.(*ast.Ident); ok {
					s.enums[t.Name] = append(s.enums[t.Name], s.constant(v))
				}
			}
		}
	}
}

// readValues evaluates the string constants. A constant may use constants that are declared later, so several passes
// may be necessary.
func (s *source) readValues() {
	for changed := true; changed; {
		changed = false
		for _, d := range s.declarations(token.CONST) {
			for _, spec := range d.Specs {
				v, ok := spec.(*ast.ValueSpec)
				if !ok || len(v.Values) != 1 || s.values[v.Names[0].Name] != "" {
					continue
				}
				if value, ok := s.evaluate(v.Values[0]); ok {
					s.values[v.Names[0].Name], changed = value, true
				}
			}
		}
	}
}

// evaluate returns the value of an expression of string literals and constants.
func (s *source) evaluate(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		value, err := strconv.Unquote(e.Value)
		return value, err == nil && e.Kind == token.STRING && value != ""
	case *ast.Ident:
		value, ok := s.values[e.Name]
		return value, ok
	case *ast.BinaryExpr:
		left, leftOK := s.evaluate(e.X)
		right, rightOK := s.evaluate(e.Y)
		return left + right, leftOK && rightOK && e.Op == token.ADD
	}
	return "", false
}

func (s *source) constant(v *ast.ValueSpec) constant {
	name := v.Names[0].Name
	return constant{name: name, value: s.values[name], doc: comment(v.Doc, v.Comment)}
}

// groups returns the string constants of a file, in order.
func (s *source) groups(file string) ([]group, error) {
	parsed, ok := s.files[file]
	if !ok {
		return nil, fmt.Errorf("%s has no file %s", s.path, file)
	}
	var groups []group
	for _, d := range parsed.Decls {
		declaration, ok := d.(*ast.GenDecl)
		if !ok || declaration.Tok != token.CONST {
			continue
		}
		g := group{doc: comment(declaration.Doc)}
		for _, spec := range declaration.Specs {
			if v, ok := spec.(*ast.ValueSpec); ok && v.Names[0].IsExported() {
				g.constants = append(g.constants, s.constant(v))
			}
		}
		if !declaration.Lparen.IsValid() { // the comment describes the constant
			g.constants[0].doc, g.doc = g.doc, ""
		}
		groups = append(groups, g)
	}
	return groups, nil
}

// comment returns the text of the first comment, without markers such as +optional.
func comment(groups ...*ast.CommentGroup) string {
	for _, g := range groups {
		if g == nil {
			continue
		}
		lines := strings.Split(g.Text(), "\n")
		lines = slices.DeleteFunc(lines, func(l string) bool { return strings.HasPrefix(l, "+") })
		return strings.TrimSpace(strings.Join(lines, "\n"))
	}
	return ""
}

// fieldDoc is a documented field of an API type.
type fieldDoc struct {
	name, doc string
	kind      string // the type, in words
	required  bool
	refers    string // the name of a type in the same package, if any
}

// fields returns the fields of a struct, including the fields of inlined structs.
func (s *source) fields(typeName string) ([]fieldDoc, error) {
	t, ok := s.types[typeName]
	if !ok {
		return nil, fmt.Errorf("%s has no type %s", s.path, typeName)
	}
	structure, ok := t.Type.(*ast.StructType)
	if !ok {
		return nil, fmt.Errorf("type %s of %s is not a struct", typeName, s.path)
	}
	var fields []fieldDoc
	for _, f := range structure.Fields.List {
		tag := ""
		if f.Tag != nil {
			tag = reflect.StructTag(strings.Trim(f.Tag.Value, "`")).Get("json")
		}
		name, options, _ := strings.Cut(tag, ",")
		if len(f.Names) == 0 && name == "" {
			inlined, ok := f.Type.(*ast.Ident)
			if !ok {
				continue // TypeMeta and ListMeta
			}
			more, err := s.fields(inlined.Name)
			if err != nil {
				return nil, err
			}
			fields = append(fields, more...)
			continue
		}
		if name == "metadata" {
			continue
		}
		d := fieldDoc{name: name, doc: comment(f.Doc, f.Comment), required: !strings.Contains(options, "omitempty")}
		if len(f.Names) > 0 {
			_, text, err := splitComment(d.doc, f.Names[0].Name, name)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", s.path, err)
			}
			d.doc = text
		}
		d.kind, d.refers = s.describe(f.Type)
		fields = append(fields, d)
	}
	return fields, nil
}

// describe returns a type in words, and the name of the type in this package that it
// refers to.
func (s *source) describe(e ast.Expr) (kind, refers string) {
	switch e := e.(type) {
	case *ast.StarExpr:
		return s.describe(e.X)
	case *ast.ArrayType:
		kind, refers := s.describe(e.Elt)
		return "list of " + kind, refers
	case *ast.MapType:
		kind, refers := s.describe(e.Value)
		return "map of string to " + kind, refers
	case *ast.SelectorExpr:
		if pkg, ok := e.X.(*ast.Ident); ok && pkg.Name == "v1alpha1" {
			return "string", "" // an enumeration of the parameters of claims
		}
		return strings.ToLower(e.Sel.Name[:1]) + e.Sel.Name[1:], ""
	case *ast.Ident:
		switch e.Name {
		case "string":
			return "string", ""
		case "bool":
			return "boolean", ""
		case "int", "int32", "int64", "uint64":
			return "integer", ""
		}
		if s.isEnum(e.Name) {
			return "string", e.Name
		}
		return e.Name, e.Name
	}
	return "value", ""
}

// isEnum reports whether a type is a string with constants.
func (s *source) isEnum(typeName string) bool { return len(s.enums[typeName]) > 0 }

var (
	// qualified matches a remark in parentheses, and the text that follows it.
	qualified = regexp.MustCompile(`(?s)^(?:\(([^)]+)\)\s+)?(.+)$`)
	// predicate matches a text that begins with a verb in the third person singular, and what follows a verb that pages
	// omit.
	predicate = regexp.MustCompile(`(?s)^(means\s+that\s+|is\s+|lists\s+|holds\s+)?(.+)$`)
	// verb matches a verb in the third person singular at the beginning of a text.
	verb = regexp.MustCompile(`^[a-z]+s\s`)
	// secondClause matches a sentence with a second clause that needs the verb "means", which pages omit.
	secondClause = regexp.MustCompile(`\b(and|or)\s+that\b`)
)

// splitComment splits a comment of the form "Name (remark) is text" into the remark and the text. The remark is
// optional. The text repeats neither the name, which may be the Go name or the name that users see, nor the verbs "is",
// "lists", "holds", and "means that". A comment of another form is an error, because its text would not be a sentence.
func splitComment(doc string, names ...string) (remark, text string, err error) {
	if doc == "" {
		return "", "", nil
	}
	wrong := func(problem string) (string, string, error) {
		return "", "", fmt.Errorf("comment %q: %s", doc, problem)
	}
	rest, found := "", false
	for _, name := range names {
		if rest, found = strings.CutPrefix(doc, name+" "); found {
			break
		}
	}
	if !found {
		return wrong("must begin with " + strings.Join(names, " or "))
	}
	match := qualified.FindStringSubmatch(rest)
	if remark, rest = match[1], match[2]; !verb.MatchString(rest) {
		return wrong("a verb such as \"is\" or \"selects\" must follow the name and the remark in parentheses")
	}
	match = predicate.FindStringSubmatch(rest)
	text = match[2]
	if first, _ := splitSentence(text); strings.HasPrefix(match[1], "means") && secondClause.MatchString(first) {
		return wrong("\"means that\" must have one clause: begin another sentence, or omit the second \"that\"")
	}
	if at := identifier.FindStringIndex(text); at != nil && at[0] == 0 && text != capitalize(text) {
		return wrong("the text must not begin with an identifier, which would be capitalized")
	}
	return remark, capitalize(text), nil
}

var sentenceEnd = regexp.MustCompile(`\.(\s|$)`)

// splitSentence returns the first sentence of a text, without its period, and the
// rest.
func splitSentence(text string) (first, rest string) {
	at := sentenceEnd.FindStringIndex(text)
	if at == nil {
		return text, ""
	}
	return strings.Join(strings.Fields(text[:at[0]]), " "), strings.TrimSpace(text[at[1]:])
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
